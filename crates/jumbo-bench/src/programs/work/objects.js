const size = Number(process.argv[2]);
const map = new Map();
for (let i = 0; i < size; i++) map.set(`key ${i * 40503 % size}`, { i, list: [i, i + 1], name: 'name ' + i });
let sum = 0;
for (let i = 0; i < 2 * size; i++) sum += map.get(`key ${i * 7919 % size}`)?.list[1] ?? 0;
const buffers = [];
for (let i = 0; i < size / 10000; i++) buffers.push(Buffer.alloc(1 << 20, i));
const text = JSON.stringify([...map.values()]);
console.log(sum, text.length, JSON.parse(text).length, buffers.reduce((sum, buffer) => sum + buffer[7], 0));
