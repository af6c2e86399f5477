// Reimplemented benchmarks of an allocator's authors, one of LOADS by name:
// `allocator NAME SIZE [THREADS]`. SIZE is the amount of work.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

static long size, threads;
static std::atomic<unsigned long> result;

struct Random {
    unsigned long state;
    explicit Random(unsigned long seed) : state(seed * 2654435761 + 88172645463325252) {}
    unsigned long operator()() { return state ^= state << 13, state ^= state >> 7, state ^= state << 17; }
    // Log-uniform: each power of two is equally likely.
    size_t spread(int lowest, int highest) {
        const int bits = lowest + static_cast<int>((*this)() % static_cast<unsigned long>(highest - lowest));
        return (1ul << bits) + (*this)() % (1ul << bits);
    }
};

static char *taken(size_t bytes) {
    char *block = static_cast<char *>(malloc(bytes));
    if (!block) exit(1);
    block[0] = block[bytes - 1] = static_cast<char>(bytes);
    return block;
}

static char *filled(size_t bytes) {
    char *block = taken(bytes);
    for (size_t at = 0; at < bytes; at += 4096) block[at] = 1;
    return block;
}

template <typename Work> static void each_thread(Work work) {
    std::vector<std::thread> all;
    for (long i = 0; i < threads; i++) all.emplace_back(work, i);
    for (auto &thread : all) thread.join();
}

// A server: each thread replaces random blocks, then hands all of them to a new thread.
static void server(size_t lowest, size_t highest) {
    constexpr int generations = 10;
    each_thread([=](long number) {
        std::vector<char *> blocks(5000);
        for (int generation = 0; generation < generations; generation++) {
            std::thread([&, generation] {
                Random random(static_cast<unsigned long>(number * generations + generation));
                for (long i = 0; i < size / generations; i++) {
                    char *&block = blocks[random() % blocks.size()];
                    free(block);
                    block = taken(lowest + random() % (highest - lowest));
                }
            }).join();
        }
        for (char *block : blocks) free(block);
    });
}

// A table of blocks of 16 bytes to 32 KiB, read and replaced at random.
static void table() {
    each_thread([](long number) {
        Random random(static_cast<unsigned long>(number));
        std::vector<std::pair<char *, size_t>> blocks(100'000);
        unsigned long sum = 0;
        for (long i = 0; i < size; i++) {
            auto &[block, bytes] = blocks[random() % blocks.size()];
            if (block) sum += static_cast<unsigned long>(block[bytes / 2]);
            free(block);
            bytes = random.spread(4, random() % 64 ? 9 : 15);
            block = taken(bytes);
            memset(block, 1, bytes);
        }
        for (auto &[block, bytes] : blocks) free(block);
        result += sum;
    });
}

// Small blocks, freed in order, in reverse, and every other one first.
static void batches() {
    each_thread([](long number) {
        Random random(static_cast<unsigned long>(number));
        std::vector<char *> blocks(20'000);
        for (long round = 0; round < size; round++) {
            for (auto &block : blocks) block = taken(1 + random() % (random() % 50 ? 100 : 1000));
            if (round % 3 == 1) std::reverse(blocks.begin(), blocks.end());
            if (round % 3 == 2)
                for (size_t i = 0; i < blocks.size(); i += 2) free(blocks[i]), blocks[i] = nullptr;
            for (char *block : blocks) free(block);
        }
    });
}

// Blocks that one thread allocates and another frees.
static void handed_over() {
    constexpr size_t batch = 100;
    struct Letter { char *blocks[batch]; };
    std::vector<std::atomic<Letter *>> box(16);
    std::atomic<long> to_send = size, to_receive = size;
    const auto send = [&](long number) {
        Random random(static_cast<unsigned long>(number));
        while (to_send-- > 0) {
            auto *letter = reinterpret_cast<Letter *>(taken(sizeof(Letter)));
            for (char *&block : letter->blocks) block = taken(16 + random() % 240);
            for (size_t at = random();; at++) {
                Letter *none = nullptr;
                if (box[at % box.size()].compare_exchange_strong(none, letter)) break;
                if (at % box.size() == 0) std::this_thread::yield();
            }
        }
    };
    const auto receive = [&] {
        while (to_receive-- > 0) {
            Letter *letter = nullptr;
            for (size_t at = 0; !(letter = box[at % box.size()].exchange(nullptr)); at++)
                if (at % box.size() == 0) std::this_thread::yield();
            for (char *block : letter->blocks) free(block);
            free(letter);
        }
    };
    each_thread([&](long number) { number % 2 ? receive() : send(number); });
}

// Objects of which some outlive their thread, and threads of the next round free them.
static void exchanged() {
    std::vector<std::atomic<char *>> common(10'000);
    for (long round = 0; round < size; round++) {
        each_thread([&, round](long number) {
            Random random(static_cast<unsigned long>(round * threads + number));
            std::vector<char *> mine, stay;
            for (int i = 0; i < 100'000; i++) {
                mine.push_back(taken(random.spread(3, random() % 100 ? 8 : 14)));
                const size_t pick = random() % mine.size();
                if (random() % 2) free(mine[pick]), mine[pick] = mine.back(), mine.pop_back();
                if (!mine.empty() && random() % 10 == 0)
                    mine.back() = common[random() % common.size()].exchange(mine.back()), mine.back() ? void() : mine.pop_back();
            }
            for (char *block : mine) free(block);
        });
    }
    for (auto &block : common) free(block);
}

// One object per thread, written in a loop: shows false sharing of cache lines.
static void lines() {
    each_thread([](long) {
        for (long round = 0; round < size; round++) {
            volatile char *block = taken(8);
            for (int i = 0; i < 20'000; i++) block[i % 8] = static_cast<char>(block[i % 8] + 1);
            free(const_cast<char *>(block));
        }
    });
}

// Twenty blocks of 5 to 25 MiB, replaced at random and filled.
static void large() {
    Random random(1);
    std::vector<char *> blocks(20);
    for (long i = 0; i < size; i++) {
        char *&block = blocks[random() % blocks.size()];
        free(block);
        block = filled((5ul << 20) + random() % (20ul << 20));
    }
    for (char *block : blocks) free(block);
}

// Each thread allocates a hundred blocks of one size, fills them and frees them, in rounds.
static void rounds(size_t bytes) {
    each_thread([=](long) {
        std::vector<char *> blocks(100);
        for (long round = 0; round < size; round++) {
            for (auto &block : blocks) block = filled(bytes);
            for (char *block : blocks) free(block);
        }
    });
}

// Bignums: many short-lived small blocks, in one thread.
static void numbers() {
    std::vector<unsigned> primes;
    unsigned *value = reinterpret_cast<unsigned *>(taken(sizeof(unsigned)));
    unsigned long length = 1;
    *value = 1;
    for (long i = 1; i <= size; i++) {
        auto *next = reinterpret_cast<unsigned *>(taken((length + 1) * sizeof(unsigned)));
        unsigned long carry = 0;
        for (unsigned long at = 0; at < length; at++) {
            carry += static_cast<unsigned long>(value[at]) * static_cast<unsigned long>(i);
            next[at] = static_cast<unsigned>(carry), carry >>= 32;
        }
        if (carry) next[length++] = static_cast<unsigned>(carry);
        // A block per digit, as in a parser.
        for (int digit = 0; digit < 20; digit++) free(taken(8 + static_cast<size_t>(digit)));
        free(value);
        value = next;
        if (length > 40) length = 40;
    }
    result += *value;
    free(value);
}

// Bodies in an octree that is rebuilt in each step.
static void bodies() {
    struct Node { Node *child[8]; double mass, centre[3]; };
    struct Body { double at[3], speed[3]; };
    std::vector<Body> all(static_cast<size_t>(size));
    Random random(1);
    for (auto &body : all) for (double &part : body.at) part = static_cast<double>(random() % 1000003) / 1000003;
    const auto release = [](auto &&self, Node *node) -> void {
        for (Node *child : node->child) if (child) self(self, child);
        free(node);
    };
    const auto make = [] {
        auto *node = reinterpret_cast<Node *>(taken(sizeof(Node)));
        *node = Node();
        return node;
    };
    for (int step = 0; step < 8; step++) {
        Node *root = make();
        for (auto &body : all) {
            double low[3] = {0, 0, 0}, width = 1;
            Node *node = root;
            for (int depth = 0; depth < 7; depth++) {
                width /= 2;
                int octant = 0;
                for (int axis = 0; axis < 3; axis++)
                    if (body.at[axis] >= low[axis] + width) octant |= 1 << axis, low[axis] += width;
                Node *&child = node->child[octant];
                if (!child) child = make();
                node = child, node->mass += 1;
                for (int axis = 0; axis < 3; axis++) node->centre[axis] += body.at[axis];
            }
        }
        for (auto &body : all) {
            for (Node *child : root->child) {
                if (!child) continue;
                for (Node *grandchild : child->child) {
                    if (!grandchild) continue;
                    for (int axis = 0; axis < 3; axis++)
                        body.speed[axis] += (grandchild->centre[axis] / grandchild->mass - body.at[axis]) * 1e-6;
                }
            }
            for (int axis = 0; axis < 3; axis++)
                body.at[axis] = std::min(0.999999, std::max(0.0, body.at[axis] + body.speed[axis]));
        }
        release(release, root);
    }
    result += static_cast<unsigned long>(all[0].at[0] * 1000);
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*run)();
    } LOADS[] = {
        {"server", [] { server(8, 1000); }},
        {"server_pages", [] { server(1000, 40'000); }},
        {"table", table},
        {"batches", batches},
        {"handed_over", handed_over},
        {"exchanged", exchanged},
        {"lines", lines},
        {"large", large},
        {"rounds_200k", [] { rounds(200'000); }},
        {"rounds_1600k", [] { rounds(1'600'000); }},
        {"numbers", numbers},
        {"bodies", bodies},
    };
    if (count < 3) return 2;
    size = atol(arguments[2]);
    threads = count > 3 ? atol(arguments[3]) : 1;
    for (const auto &load : LOADS) {
        if (strcmp(load.name, arguments[1]) != 0) continue;
        load.run();
        // Keeps the compiler from removing the work.
        printf("%lu\n", result.load());
        return 0;
    }
    return 2;
}
