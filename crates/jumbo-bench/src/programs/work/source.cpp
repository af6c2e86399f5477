// Input for a compiler: many template instantiations.
#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

template <int N> int all() {
    std::map<std::array<int, N>, std::string> names;
    std::unordered_map<std::string, std::array<char, N>> found;
    std::vector<std::array<char, N>> keys(N);
    std::sort(keys.begin(), keys.end());
    std::stable_sort(keys.begin(), keys.end(), std::greater<>());
    for (auto &key : keys) names[{key[0]}] += std::to_string(key[0]), found[std::to_string(N)] = key;
    int rest = 0;
    if constexpr (N > 1) rest = all<N - 1>();
    return rest + names.size() + found.size();
}

int main(int, char **arguments) {
    return arguments[0][0] + all<SIZE>();
}
