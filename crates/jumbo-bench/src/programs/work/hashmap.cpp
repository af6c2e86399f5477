// A hash map of strings: built, searched, freed. Growing frees its tables; nodes are small objects.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unordered_map>

int main(int, char **arguments) {
    const long size = atol(arguments[1]);
    unsigned long state = 88172645463325252;
    const auto next = [&] {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return state;
    };
    const auto key = [&] { return "a key of some length " + std::to_string(next() % (2 * size)); };
    unsigned long sum = 0;
    {
        std::unordered_map<std::string, long> map;
        for (long i = 0; i < size; i++) map[key()] += i;
        for (long i = 0; i < 2 * size; i++) {
            const auto found = map.find(key());
            if (found != map.end()) sum += found->second;
        }
    }
    printf("%lu\n", sum);
}
