// Shortest paths in a random graph: a small vector per node, a growing heap, random accesses.
#include <cstdio>
#include <cstdlib>
#include <queue>
#include <vector>

int main(int, char **arguments) {
    const long nodes = atol(arguments[1]);
    unsigned long state = 88172645463325252;
    const auto next = [&] {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return state;
    };
    std::vector<std::vector<std::pair<int, int>>> edges(nodes);
    for (long i = 0; i < 8 * nodes; i++) {
        const long from = next() % nodes, to = next() % nodes;
        edges[from].emplace_back(to, 1 + next() % 100);
    }
    std::vector<long> distance(nodes, 1L << 60);
    std::priority_queue<std::pair<long, int>> queue;
    distance[0] = 0, queue.emplace(0, 0);
    while (!queue.empty()) {
        const auto [far, node] = queue.top();
        queue.pop();
        if (-far > distance[node]) continue;
        for (const auto [to, length] : edges[node])
            if (distance[node] + length < distance[to]) queue.emplace(-(distance[to] = distance[node] + length), to);
    }
    unsigned long sum = 0;
    for (const long far : distance) sum += far;
    printf("%lu\n", sum);
}
