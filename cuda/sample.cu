// Draws tokens from logits, the ones that the CPU draws (src/backend/cpu/sample): weights of tokens are integers, whose sums
// do not depend on their order.
//
// The launches of one draw, one behind the other, each a grid (blocks, rows), of which block x looks at `share` logits of a row:
//
//   sample_largest         the largest logit; with temperature 0 also the token, and nothing follows
//   sample_logits  (x 3)   top-k: the k-th largest logit, by histograms of the bits of keys, eleven, eleven and ten of them
//   sample_weights (x 3)   top-p: the least weight that is kept, by sums of weights, by eleven, ten and ten of their bits
//   sample_draw            the token
//
// The last block of a row to arrive draws the conclusions. What a draw leaves in `rows` and `bins` is zeros again.
#include "parts.cuh"
#include "scan.cuh"

namespace {

using namespace cq;

// That of CUDA's atomics.
using u64 = unsigned long long;

constexpr uint32_t THREADS = CQ_THREADS;
constexpr uint32_t BINS = CQ_SAMPLE_BINS;
static_assert(BINS % THREADS == 0, "a thread concludes from whole bins");

// Dynamic shared memory. Bins are two words: it adds words itself, but of longer numbers one thread after the other.
struct Shared {
    uint32_t low[BINS], high[BINS];
    u64 scan[WARPS_OF_BLOCK];
    u64 number[2];
    uint32_t place[4];
};
static_assert(sizeof(Shared) == CQ_SAMPLE_SHARED_BYTES, "what the host asks for");

__device__ __forceinline__ Shared &shared() {
    CQ_DYNAMIC_SHARED(memory);
    return *reinterpret_cast<Shared *>(memory);
}

// Some bits of a number, of which those above are known.
struct Digit {
    uint32_t shift, bits;

    __device__ __forceinline__ bool follows(uint32_t number, uint32_t above) const { return u64(number) >> (shift + bits) == above; }
    __device__ __forceinline__ uint32_t of(uint32_t number) const { return number >> shift & ((1u << bits) - 1); }
};

__device__ __forceinline__ Digit digit_of_keys(uint32_t digit) { return {digit == 0 ? 21u : digit == 1 ? 10u : 0u, digit == 2 ? 10u : 11u}; }
__device__ __forceinline__ Digit digit_of_weights(uint32_t digit) { return {digit == 0 ? 20u : digit == 1 ? 10u : 0u, digit == 0 ? 11u : 10u}; }

// Keys are in the order of logits; there is one zero, and NaN is above all.
constexpr uint32_t KEY_OF_INFINITY = 0xff800000u, KEY_OF_MINUS_INFINITY = 0x007fffffu;

__device__ __forceinline__ uint32_t key_of(float logit) {
    const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.f));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// 2^31 exp(x) for x <= 0, rounded down: the operations of the CPU's exp.rs, none of them fused.
__device__ __forceinline__ uint32_t weight_of(float x) {
    constexpr float ROUND = 12582912.f, LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
    float exponent = __fmul_rn(x, LOG2_E);
    exponent = exponent > -64.f ? exponent : -64.f;
    const float shifted = __fadd_rn(exponent, ROUND);
    const float fraction = __fsub_rn(exponent, __fsub_rn(shifted, ROUND));
    constexpr float COEFFICIENTS[] = {1.3333558e-3f, 9.618129e-3f, 5.550411e-2f, 0.2402265f, LN_2, 1.f};
    float power = 1.540353e-4f;
#pragma unroll
    for (float coefficient : COEFFICIENTS) power = __fadd_rn(__fmul_rn(power, fraction), coefficient);
    const uint32_t integer = __float_as_uint(shifted) - __float_as_uint(ROUND);
    return static_cast<uint32_t>(__float2int_rz(__fmul_rn(power, __uint_as_float((integer + 127 + 31) << 23))));
}

// Philox4x32-10: 64 bits for a step and a row, by the key `seed`.
__device__ __forceinline__ u64 random_bits(u64 seed, u64 step, uint32_t row) {
    uint32_t a = uint32_t(step), b = uint32_t(step >> 32), c = row, d = 0;
    uint32_t low_key = uint32_t(seed), high_key = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint32_t first_high = __umulhi(0xD2511F53u, a), first_low = 0xD2511F53u * a;
        const uint32_t second_high = __umulhi(0xCD9E8D57u, c), second_low = 0xCD9E8D57u * c;
        a = second_high ^ b ^ low_key;
        b = second_low;
        c = first_high ^ d ^ high_key;
        d = first_low;
        low_key += 0x9E3779B9u;
        high_key += 0xBB67AE85u;
    }
    return u64(b) << 32 | a;
}

// Every `step`-th token from `first` on.
struct Tokens {
    uint32_t first, step, end;
};

// So many of a thread's logits are on their way at once.
constexpr uint32_t BATCH = 4;
struct Logits {
    float of[BATCH];
};

// A row of logits and what is known of it.
struct Row {
    const CqSample &p;
    CqSampleRow *state;

    __device__ __forceinline__ explicit Row(const CqSample &p) : p(p), state(p.rows + blockIdx.y) {}

    __device__ __forceinline__ float logit(uint32_t token) const { return load_float(p.logits, size_t(blockIdx.y) * p.vocabulary + token, p.dtype); }

    // Those of this block, a thread for each.
    __device__ __forceinline__ Tokens tokens() const {
        const uint32_t begin = blockIdx.x * p.share;
        return {begin + threadIdx.x, THREADS, min(p.vocabulary, begin + p.share)};
    }

    // The first of them.
    __device__ __forceinline__ Logits load(const Tokens &tokens) const {
        Logits logits = {};
        auto load = [&](uint32_t dtype) {
#pragma unroll
            for (uint32_t i = 0; i < BATCH; ++i)
                if (const uint32_t token = tokens.first + i * tokens.step; token < tokens.end)
                    logits.of[i] = load_float(p.logits, size_t(blockIdx.y) * p.vocabulary + token, dtype);
        };
        // Loads behind branches of their own would wait for each other.
        if (p.dtype == CQ_F32)
            load(CQ_F32);
        else if (p.dtype == CQ_F16)
            load(CQ_F16);
        else
            load(CQ_BF16);
        return logits;
    }

    // Calls visit(token, logit) for all of them, the first of which have been loaded.
    template <class Visit> __device__ __forceinline__ void visit(Tokens tokens, Logits logits, Visit visit) const {
        while (tokens.first < tokens.end) {
#pragma unroll
            for (uint32_t i = 0; i < BATCH; ++i)
                if (const uint32_t token = tokens.first + i * tokens.step; token < tokens.end) visit(token, logits.of[i]);
            tokens.first += BATCH * tokens.step;
            logits = load(tokens);
        }
    }

    // Adds `number` to the block's histogram.
    __device__ __forceinline__ void count(uint32_t bin, uint32_t number) const {
        const uint32_t before = atomicAdd(&shared().low[bin], number);
        if (before + number < before) atomicAdd(&shared().high[bin], 1u);
    }

    __device__ __forceinline__ u64 *bins() const { return reinterpret_cast<u64 *>(p.bins) + size_t(blockIdx.y) * BINS; }

    // Adds the block's histogram to that of the row; whether this block is the last to do so.
    __device__ __forceinline__ bool is_last_to_add() const {
        __syncthreads();
        for (uint32_t bin = threadIdx.x; bin < BINS; bin += THREADS)
            if (const u64 sum = u64(shared().high[bin]) << 32 | shared().low[bin]) atomicAdd(bins() + bin, sum);
        return last_of_parts(&state->arrivals, gridDim.x);
    }
};

__device__ __forceinline__ void begin_histogram() {
    for (uint32_t bin = threadIdx.x; bin < BINS; bin += THREADS) shared().low[bin] = shared().high[bin] = 0;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    __syncthreads();
}

// What the launch of the largest logit has found.
struct Largest {
    uint32_t key;

    __device__ __forceinline__ explicit Largest(const CqSampleRow *state) : key(uint32_t(load_again(&state->largest) >> 32)) {}

    __device__ __forceinline__ bool is_finite() const { return key > KEY_OF_MINUS_INFINITY && key < KEY_OF_INFINITY; }

    __device__ __forceinline__ uint32_t weight(const CqSample &p, float logit) const {
        return weight_of(__fdiv_rn(__fsub_rn(logit, logit_of(key)), p.temperature));
    }
};

// The highest bin at which it and those above come to need(all bins), and what those above come to. All bins become 0.
struct Found {
    uint32_t bin;
    u64 above, need;
};

template <class Need> __device__ __forceinline__ Found find_bin(u64 *bins, Need need_of) {
    constexpr uint32_t EACH = BINS / THREADS;
    Shared &memory = shared();
    // From the highest on.
    const uint32_t first = BINS - 1 - threadIdx.x * EACH;
    u64 own[EACH], sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < EACH; ++i) {
        own[i] = load_again(bins + first - i);
        bins[first - i] = 0;
        sum += own[i];
    }
    u64 above = sum_before(sum, memory.scan);
    if (threadIdx.x == THREADS - 1) memory.number[0] = above + sum;
    __syncthreads();
    const u64 need = need_of(memory.number[0]);
#pragma unroll
    for (uint32_t i = 0; i < EACH; ++i) {
        if (above < need && above + own[i] >= need) {
            memory.place[0] = first - i;
            memory.number[1] = above;
        }
        above += own[i];
    }
    __syncthreads();
    return {memory.place[0], memory.number[1], need};
}

// Block 0 of a grid of one for each row would do; the last block is there anyway. One thread, which knows what nobody reads
// any more.
__device__ __forceinline__ void finish(const Row &row, uint32_t token) {
    row.p.ids[blockIdx.y] = token;
    *row.state = {};
}

__device__ __forceinline__ void find_largest(const CqSample &p) {
    const Row row(p);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    // Of equal ones the first.
    u64 largest = 0;
    const Tokens tokens = row.tokens();
    row.visit(tokens, row.load(tokens), [&](uint32_t token, float logit) { largest = max(largest, u64(key_of(logit)) << 32 | uint32_t(~token)); });
#pragma unroll
    for (int distance = 16; distance; distance /= 2) largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
    u64 *of_warps = shared().scan, *of_row = reinterpret_cast<u64 *>(&row.state->largest);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t warp = 1; warp < WARPS_OF_BLOCK; ++warp) largest = max(largest, of_warps[warp]);
        atomicMax(of_row, largest);
    }
    if (p.temperature > 0 || !last_of_parts(&row.state->arrivals, gridDim.x) || threadIdx.x != 0) return;
    const uint32_t token = ~uint32_t(load_again(of_row));
    finish(row, Largest(row.state).is_finite() ? token : CQ_NOT_FINITE);
}

__device__ __forceinline__ void narrow_logits(const CqSample &p) {
    const Row row(p);
    begin_histogram();
    const Tokens tokens = row.tokens();
    const Logits ahead = row.load(tokens);
    const Largest largest(row.state);
    const Digit digit = digit_of_keys(p.digit);
    const uint32_t known = load_again(&row.state->logit_key);
    const uint32_t left = p.digit == 0 ? p.top_k : load_again(&row.state->logit_ties);
    if (!largest.is_finite()) return;
    row.visit(tokens, ahead, [&](uint32_t, float logit) {
        const uint32_t key = key_of(logit);
        if (digit.follows(key, known)) row.count(digit.of(key), 1);
    });
    if (!row.is_last_to_add()) return;
    const Found found = find_bin(row.bins(), [&](u64) { return u64(left); });
    if (threadIdx.x == 0) {
        row.state->logit_key = known << digit.bits | found.bin;
        row.state->logit_ties = uint32_t(left - found.above);
    }
}

// The part p.top_p, in units of 2^-32, of `total`, rounded up, at least 1.
__device__ __forceinline__ u64 share_of(const CqSample &p, u64 total) {
    const u64 low = total * p.top_p, high = __umul64hi(total, p.top_p);
    const u64 part = (high << 32 | low >> 32) + (uint32_t(low) != 0);
    return max(u64(1), min(part, total));
}

__device__ __forceinline__ void narrow_weights(const CqSample &p) {
    const Row row(p);
    begin_histogram();
    const Tokens tokens = row.tokens();
    const Logits ahead = row.load(tokens);
    const Largest largest(row.state);
    const Digit digit = digit_of_weights(p.digit);
    const uint32_t known = load_again(&row.state->weight), logit_key = load_again(&row.state->logit_key);
    const uint32_t ties = load_again(&row.state->logit_ties);
    const u64 left = load_again(&row.state->need);
    if (!largest.is_finite()) return;
    row.visit(tokens, ahead, [&](uint32_t, float logit) {
        if (key_of(logit) <= logit_key) return;
        const uint32_t weight = largest.weight(p, logit);
        if (digit.follows(weight, known)) row.count(digit.of(weight), weight);
    });
    if (!row.is_last_to_add()) return;
    // Of the logits that are equal to the k-th largest some count.
    if (threadIdx.x == 0 && ties) {
        const uint32_t weight = largest.weight(p, logit_of(logit_key));
        if (digit.follows(weight, known)) atomicAdd(row.bins() + digit.of(weight), u64(ties) * weight);
    }
    __syncthreads();
    const Found found = find_bin(row.bins(), [&](u64 total) { return p.digit == 0 ? share_of(p, total) : left; });
    if (threadIdx.x == 0) {
        const uint32_t weight = known << digit.bits | found.bin;
        const u64 need = found.need - found.above;
        row.state->weight = weight;
        row.state->need = need;
        // Of the last digit: how many of this weight are kept.
        row.state->weight_ties = p.digit < 2 ? 0 : uint32_t((need + max(weight, 1u) - 1) / max(weight, 1u));
    }
}

// What is left of the tokens that are just not above a border, and of the place that is drawn.
struct Left {
    u64 at;
    uint32_t logit_ties, weight_ties;
};

// Which tokens are kept, and what they weigh.
struct Kept {
    const CqSample &p;
    Largest largest;
    uint32_t logit_key, weight, weight_of_ties;

    __device__ __forceinline__ explicit Kept(const Row &row)
        : p(row.p), largest(row.state), logit_key(load_again(&row.state->logit_key)), weight(load_again(&row.state->weight)),
          weight_of_ties(logit_key ? largest.weight(p, logit_of(logit_key)) : 0) {}

    // A token, or several in order, that have not been weighed against what is left.
    __device__ __forceinline__ void add(CqSampleShare &share, float logit) const {
        const uint32_t key = key_of(logit);
        if (key == logit_key) ++share.logit_ties;
        if (key <= logit_key) return;
        const uint32_t own = largest.weight(p, logit);
        if (own == weight) ++share.weight_ties;
        if (own > weight && own >= p.least_weight) share.above += own;
    }

    // Of some tokens, whether they are kept depends on others; else there are none that are just not above a border.
    __device__ __forceinline__ bool has_ties() const { return logit_key || weight >= p.least_weight; }

    __device__ __forceinline__ Left left(const Row &row) const {
        return {0, load_again(&row.state->logit_ties), weight >= p.least_weight ? load_again(&row.state->weight_ties) : 0};
    }

    // What a share weighs; takes its ties from what is left.
    __device__ __forceinline__ u64 take(const CqSampleShare &share, Left &left) const {
        const uint32_t logits = min(share.logit_ties, left.logit_ties);
        const bool ties_are_above = weight_of_ties > weight && weight_of_ties >= p.least_weight;
        const uint32_t weights = min(share.weight_ties + (weight_of_ties == weight ? logits : 0), left.weight_ties);
        left.logit_ties -= logits;
        left.weight_ties -= weights;
        return share.above + (ties_are_above ? u64(logits) * weight_of_ties : 0) + u64(weights) * weight;
    }
};

// What the shares of all threads come to, for the first of them.
__device__ __forceinline__ CqSampleShare sum_of_block(const Kept &kept, const CqSampleShare &mine) {
    Shared &memory = shared();
    auto sum = [&](u64 number) {
#pragma unroll
        for (int distance = 16; distance; distance /= 2) number += __shfl_xor_sync(FULL_WARP, number, distance);
        if (threadIdx.x % 32 == 0) memory.scan[threadIdx.x / 32] = number;
        __syncthreads();
        u64 of_block = 0;
        if (threadIdx.x == 0)
            for (uint32_t warp = 0; warp < WARPS_OF_BLOCK; ++warp) of_block += memory.scan[warp];
        return of_block;
    };
    CqSampleShare all = {sum(mine.above), 0, 0};
    if (kept.has_ties()) {
        __syncthreads();
        // Neither is more than the vocabulary.
        const u64 ties = sum(u64(mine.weight_ties) << 32 | mine.logit_ties);
        all.logit_ties = uint32_t(ties), all.weight_ties = uint32_t(ties >> 32);
    }
    return all;
}

// The thread in whose share the place lies, and what is left there. The shares are those of neighbours; `place` is told what all
// weigh.
template <class Place> __device__ __forceinline__ uint32_t locate(const Kept &kept, const CqSampleShare &mine, Left &left, Place place) {
    Shared &memory = shared();
    auto after = [](uint32_t all, u64 before) { return all - uint32_t(min(u64(all), before)); };
    Left own = left;
    if (kept.has_ties()) {
        own.logit_ties = after(left.logit_ties, sum_before(u64(mine.logit_ties), memory.scan));
        const uint32_t logits = kept.weight_of_ties == kept.weight ? min(mine.logit_ties, own.logit_ties) : 0;
        own.weight_ties = after(left.weight_ties, sum_before(u64(mine.weight_ties + logits), memory.scan));
    }
    const Left before = own;
    const u64 weight = kept.take(mine, own), begin = sum_before(weight, memory.scan);
    if (threadIdx.x == THREADS - 1) memory.number[0] = begin + weight;
    __syncthreads();
    const u64 at = place(memory.number[0]);
    if (begin <= at && at < begin + weight) {
        memory.number[1] = at - begin;
        memory.place[0] = threadIdx.x;
        memory.place[1] = before.logit_ties;
        memory.place[2] = before.weight_ties;
    }
    __syncthreads();
    left = {memory.number[1], memory.place[1], memory.place[2]};
    return memory.place[0];
}

static_assert(CQ_SAMPLE_BLOCKS == THREADS, "a thread for the share of each block");

__device__ __forceinline__ void draw(const CqSample &p) {
    const Row row(p);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const Tokens tokens = row.tokens();
    const Logits ahead = row.load(tokens);
    const Kept kept(row);
    Left left = kept.left(row);
    const u64 seed = p.draw ? load_again(p.draw) : p.seed, step = p.draw ? load_again(p.draw + 1) : p.step;
    CqSampleShare *shares = p.shares + size_t(blockIdx.y) * CQ_SAMPLE_BLOCKS;
    if (kept.largest.is_finite()) {
        CqSampleShare share = {};
        row.visit(tokens, ahead, [&](uint32_t, float logit) { kept.add(share, logit); });
        share = sum_of_block(kept, share);
        if (threadIdx.x == 0) shares[blockIdx.x] = share;
    }
    if (!last_of_parts(&row.state->arrivals, gridDim.x)) return;
    if (!kept.largest.is_finite()) {
        if (threadIdx.x == 0) finish(row, CQ_NOT_FINITE);
        return;
    }

    CqSampleShare of_block = {};
    if (threadIdx.x < gridDim.x) of_block = load_again(shares + threadIdx.x);
    const u64 random = random_bits(seed, step, blockIdx.y);
    const uint32_t block = locate(kept, of_block, left, [&](u64 total) { return __umul64hi(random, total); });

    // Neighbours of that block, then one after the other.
    const uint32_t begin = block * p.share, end = min(p.vocabulary, begin + p.share);
    const uint32_t each = (end - begin + THREADS - 1) / THREADS;
    auto first_of = [&](uint32_t thread) { return min(end, begin + thread * each); };
    const Tokens mine = {first_of(threadIdx.x), 1, first_of(threadIdx.x + 1)};
    CqSampleShare of_thread = {};
    row.visit(mine, row.load(mine), [&](uint32_t, float logit) { kept.add(of_thread, logit); });
    const u64 at = left.at;
    if (threadIdx.x != locate(kept, of_thread, left, [&](u64) { return at; })) return;
#pragma unroll 1
    for (uint32_t token = mine.first;; ++token) {
        CqSampleShare alone = {};
        kept.add(alone, row.logit(token));
        const u64 weight = kept.take(alone, left);
        if (left.at < weight || token + 1 >= mine.end) return finish(row, token);
        left.at -= weight;
    }
}

}  // namespace

CQ_KERNEL(sample_largest, CqSample, THREADS, 4) { find_largest(p); }
CQ_KERNEL(sample_logits, CqSample, THREADS, 2) { narrow_logits(p); }
CQ_KERNEL(sample_weights, CqSample, THREADS, 2) { narrow_weights(p); }
CQ_KERNEL(sample_draw, CqSample, THREADS, 2) { draw(p); }
