#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>
template <int N> int all() {
    std::map<std::array<int, N>, std::string> names;
    std::vector<std::array<char, N>> keys(N);
    std::sort(keys.begin(), keys.end());
    std::stable_sort(keys.begin(), keys.end(), std::greater<>());
    for (auto &key : keys) names[{key[0]}] += std::to_string(key[0]);
    int rest = 0;
    if constexpr (N > 1) rest = all<N - 1>();
    return rest + names.size();
}
int main() { return all<2>(); }
