import sys

size = int(sys.argv[1])
names = {f"name {i * 2654435761 % 4294967296}": i for i in range(size)}
keys = list(names)
total = 0
for step in (1, 7919):
    for i in range(size):
        total += names[keys[i * step % size]]
pairs = sorted((value % 1000, key) for key, value in names.items())
print(total, pairs[size // 2])
