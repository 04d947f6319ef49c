// Compares every wrapper of device.cuh on the GPU with its branch for the host: exhaustively where that is
// possible, and the matrix product with exact arithmetic.
//
// Prints a line of JSON for each check; fails if one finds a difference. Built without CUDA, the emulator stands
// in for the GPU, which tests the emulator's matrix product and these checks.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>

#include "halves.h"
#include "runner.h"

namespace {

using Words = std::vector<uint32_t>;
using Canonical = std::function<uint32_t(uint32_t)>;

const char *kind = "wrapper";  // of the records
int failures = 0;

void report(const char *name, uint64_t cases, uint64_t wrong, const std::string &rest = "") {
    printf("{\"kind\": \"%s\", \"name\": \"%s\", \"cases\": %" PRIu64 ", \"wrong\": %" PRIu64 "%s}\n", kind, name, cases, wrong,
           rest.c_str());
    fflush(stdout);
    failures += wrong > 0;
}

std::string field(const char *name, double value) {
    char text[80];
    snprintf(text, sizeof text, ", \"%s\": %.3g", name, value);
    return text;
}

// The bits of a NaN are the machine's choice; everything else must be equal.
uint32_t as_is(uint32_t word) { return word; }
uint32_t float_word(uint32_t word) { return (word & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : word; }
uint32_t half_pair(uint32_t word) {
    auto one = [](uint32_t half) { return (half & 0x7fffu) > 0x7c00u ? 0x7fffu : half; };
    return one(word & 0xffffu) | one(word >> 16) << 16;
}

void compare(Runner &subject, Runner &reference, const char *kernel, const Words &in, int in_words, int out_words,
             const Canonical &canonical = as_is) {
    const uint64_t count = in.size() / in_words;
    const Words got = subject.items(kernel, in, count, out_words), want = reference.items(kernel, in, count, out_words);
    uint64_t wrong = 0;
    std::string first;
    for (uint64_t i = 0; i < got.size(); ++i) {
        if (canonical(got[i]) == canonical(want[i])) continue;
        if (wrong++ > 0) continue;
        char text[160];
        snprintf(text, sizeof text, ", \"note\": \"input %08x: 0x%08x, not 0x%08x\"", in[i / out_words * in_words], got[i], want[i]);
        first = text;
    }
    report(kernel + strlen("test_"), count, wrong, first);
}

Words up_to(uint32_t end) {
    Words words(end);
    for (uint32_t i = 0; i < end; ++i) words[i] = i;
    return words;
}

Words random_words(size_t count) {
    std::mt19937 random(1);
    Words words(count);
    for (auto &word : words) word = random();
    return words;
}

void compare_items(Runner &subject, Runner &reference) {
    const Words random = random_words(3 << 18), all_16_bits = up_to(65536);
    auto with = [&](const char *kernel, const Words &in, int in_words, int out_words, const Canonical &canonical = as_is) {
        compare(subject, reference, kernel, in, in_words, out_words, canonical);
    };
    with("test_and_or", random, 3, 1);
    with("test_select_of_eight", random, 3, 1);
    with("test_load_1", random, 1, 1);
    with("test_load_2", random, 2, 2);
    with("test_load_4", random, 4, 4);
    with("test_load_4_kept", random, 4, 4);
    with("test_e4m3x2", all_16_bits, 1, 1, half_pair);
    Words both_pairs = all_16_bits;
    for (auto &word : both_pairs) word |= (65535 - word) << 16;
    with("test_e4m3x4", both_pairs, 1, 2, half_pair);
    with("test_e8m0", up_to(256), 1, 1, float_word);
    with("test_bf16_to_float", all_16_bits, 1, 1, float_word);
    with("test_half_to_float", all_16_bits, 1, 1, float_word);
    with("test_load_float", random, 1, 3, float_word);
    with("test_store_f32", random, 1, 1);
    with("test_round_f16", all_16_bits, 1, 1);  // each of them 65536 floats: all there are
    with("test_round_bf16", all_16_bits, 1, 1);
    with("test_arithmetic", random, 3, 6, float_word);
    with("test_bits", random, 3, 2);
    with("test_hmul2", all_16_bits, 1, 1);
    with("test_copy", random, 4, 4);
    with("test_transposed", random, 1, 1);
    with("test_load_transposed", random, 4, 4);
    with("test_dependent_launch", random, 1, 1);
}

// Matrix products of one kind.
struct Problems {
    const char *name;
    bool exact;  // fp32 sums in any order are exact, so the result must be
    int count;
    std::function<double(int problem, int row, int k)> a;
    std::function<double(int problem, int k, int column)> b;
    std::function<double(int problem)> c = [](int) { return 0.0; };
};

// What A and B are made of.
struct Element {
    const char *kernel;
    uint16_t (*bits)(double);
    double (*value)(uint16_t);
    bool is_bf16;
};
constexpr Element ELEMENTS[] = {{"test_mma", half_bits, half_value, false}, {"test_mma_bf16", bfloat_bits, bfloat_value, true}};

// Of the sum of magnitudes: sixteen products and C, each cut off 2^-23 below the largest.
constexpr double MOST_ERROR = 17.0 / (1 << 23);

void check_products(Runner &subject, Runner &reference, const Element &element, const Problems &problems) {
    std::vector<uint16_t> a, b;
    std::vector<float> c;
    for (int i = 0; i < problems.count; ++i) {
        for (int r = 0; r < 16; ++r)
            for (int k = 0; k < 16; ++k) a.push_back(element.bits(problems.a(i, r, k)));
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 8; ++n) b.push_back(element.bits(problems.b(i, k, n)));
        for (int e = 0; e < 128; ++e) c.push_back(float(problems.c(i)));
    }
    const auto got = subject.products(element.kernel, a, b, c), emulated = reference.products(element.kernel, a, b, c);
    uint64_t wrong = 0, unlike_emulator = 0;
    double worst = 0;
    for (int i = 0; i < problems.count; ++i)
        for (int r = 0; r < 16; ++r)
            for (int n = 0; n < 8; ++n) {
                const size_t at = size_t(i) * 128 + r * 8 + n;
                double exact = c[at], magnitude = std::fabs(c[at]);
                for (int k = 0; k < 16; ++k) {
                    const double product = element.value(a[size_t(i) * 256 + r * 16 + k]) * element.value(b[size_t(i) * 128 + k * 8 + n]);
                    exact += product;
                    magnitude += std::fabs(product);
                }
                unlike_emulator += memcmp(&got[at], &emulated[at], 4) != 0 && !(std::isnan(got[at]) && std::isnan(emulated[at]));
                if (!std::isfinite(exact)) {
                    wrong += std::isnan(exact) ? !std::isnan(got[at]) : double(got[at]) != exact;
                    continue;
                }
                const double error = magnitude > 0 ? std::fabs(got[at] - exact) / magnitude : std::fabs(got[at]);
                worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
                wrong += problems.exact ? double(got[at]) != exact : !(error <= MOST_ERROR);
            }
    report((element.kernel + strlen("test_") + std::string(" ") + problems.name).c_str(), got.size(), wrong,
           field("worst", std::isfinite(worst) ? worst : 1e300) + field("unlike_emulator", double(unlike_emulator)));
}

void check_all_products(Runner &subject, Runner &reference) {
    std::mt19937 random(2);
    auto integer = [&](int low, int high) { return [&random, low, high](int, int, int) { return double(int(random() % (high - low + 1)) + low); }; };
    auto scaled = [](std::function<double(int, int, int)> f, double by) { return [=](int p, int i, int j) { return f(p, i, j) * by; }; };
    auto normal = [&](int, int, int) { return std::normal_distribution<double>()(random); };
    auto wide = [&](int, int, int) { return std::ldexp(std::normal_distribution<double>()(random), int(random() % 20) - 12); };
    auto e2m1 = [&](int, int, int) {
        const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        return values[random() % 8] * (random() % 2 ? -1 : 1);
    };
    auto with_one = [&](double special) {
        return [&random, special](int p, int i, int j) { return i == p % 16 && j == p / 16 % 16 ? special : double(int(random() % 5)) - 2; };
    };
    const double subnormal_unit = std::ldexp(1, -24);
    const Problems all[] = {
        // Row p / 16 of A picks row p % 16 of B: finds any misplaced element of a fragment.
        {"one-hot", true, 256, [](int p, int r, int k) { return p / 16 == r && p % 16 == k; }, [](int, int k, int n) { return k * 8 + n + 1; }},
        {"integers", true, 512, integer(-16, 16), integer(-16, 16), [](int p) { return p - 256; }},
        {"codes with offset 1024", true, 512, integer(1024, 1039), integer(-16, 16)},
        {"subnormal A", true, 512, scaled(integer(-1023, 1023), subnormal_unit), integer(-4, 4)},
        {"subnormal B", true, 512, integer(-4, 4), scaled(integer(-1023, 1023), subnormal_unit)},
        {"E2M1 in place, 0.5 subnormal", true, 512, scaled(e2m1, std::ldexp(1, -14)), integer(-16, 16)},
        {"normal", false, 4096, normal, normal, [](int p) { return p / 4096.0; }},
        {"wide range", false, 4096, wide, wide},
        {"largest", false, 64, integer(65504, 65504), integer(60000, 65504)},
        {"infinity in A", true, 512, with_one(INFINITY), integer(-2, 2)},
        {"NaN in A", true, 512, with_one(NAN), integer(-2, 2)},
        {"infinity in B", true, 512, integer(-2, 2), with_one(-INFINITY)},
    };
    for (const auto &element : ELEMENTS) {
        if (element.is_bf16 && !subject.has_bf16()) {
            fprintf(stderr, "%s: not run, what these kernels were compiled for has no such product\n", element.kernel);
            continue;
        }
        for (const auto &problems : all) check_products(subject, reference, element, problems);
    }
}

}  // namespace

// wrappers [KIND]
int main(int count, char **arguments) {
    if (count > 1) kind = arguments[1];
    const std::unique_ptr<Runner> reference(emulator()), device(gpu());
    Runner &subject = device ? *device : *reference;
    fprintf(stderr, "on %s\n", subject.name().c_str());
    compare_items(subject, *reference);
    check_all_products(subject, *reference);
    return failures ? 1 : 0;
}
