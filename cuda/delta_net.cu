// delta_net: linear attention by the gated delta rule, with the convolution before it and the norm and the gates behind
// (CqDeltaNet).
//
// A block has a head of values of a sequence, token by token, and the head's state [key_dim, value_dim] in registers: `groups`
// threads share a column, each every groups-th row. A column changes by itself, so the only sums over threads are those over the
// rows of a column: what the state has for a key, and what the query sees. They are added up in the order of threads.
//
// Each of the first 2 key_dim + value_dim threads convolves a channel, whose last tokens it keeps in registers; inputs of the
// next token are on their way while this one is computed. Nothing of the state depends on what earlier kernels of the step do, so
// that it is read before they have finished.
#include "finish.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_DELTA_THREADS, ROWS = CQ_DELTA_ROWS, KERNEL = CQ_DELTA_KERNEL;
constexpr int KEYS = CQ_DELTA_GROUPS * ROWS;  // of a query or key in shared memory, zeros behind its end
constexpr float LENGTH_EPS = 1e-6f;
static_assert(CQ_DELTA_SHARED_BYTES == (2 * KEYS + 3 * THREADS) * sizeof(float), "the parts of Memory");

// What threads tell each other.
struct Memory {
    float query[KEYS], key[KEYS], value[THREADS];
    float known[THREADS], output[THREADS];  // sums of each thread
};

// What a head of values is, and which numbers of its tokens a thread has.
struct Head {
    uint32_t head, key_head, of_key;  // the last: which of those that share it
    size_t first_row, state;          // of all tokens, of all heads of all sequences

    __device__ __forceinline__ explicit Head(const CqDeltaNet &p) {
        head = blockIdx.x, key_head = head / p.shared, of_key = head - key_head * p.shared;
        first_row = size_t(blockIdx.y) * p.tokens, state = size_t(blockIdx.y) * p.value_heads + head;
    }

    // Number `index` of what the head has of a lane, `size` numbers of each head of values.
    __device__ __forceinline__ size_t at(const CqLane &lane, uint32_t size, uint32_t index) const {
        return first_row * lane.of_token + size_t(key_head) * lane.of_head + of_key * size + index;
    }
};

// A channel of the convolution: where it comes from, where it goes, its weights and its last tokens, the oldest first.
struct Channel {
    const void *from;
    size_t at;
    uint32_t of_token;
    float *to;
    float weight[KERNEL], older[KERNEL - 1];

    // Its number among all of all heads.
    uint32_t index;

    __device__ __forceinline__ Channel(const CqDeltaNet &p, const Head &head, Memory &memory) {
        const uint32_t i = threadIdx.x, keys = p.value_heads / p.shared * p.key_dim;
        const bool is_query = i < p.key_dim, is_key = !is_query && i < 2 * p.key_dim;
        const uint32_t of_part = is_query ? i : is_key ? i - p.key_dim : i - 2 * p.key_dim;
        const CqLane &lane = is_query ? p.q : is_key ? p.k : p.v;
        from = lane.x, of_token = lane.of_token;
        at = is_query || is_key ? head.first_row * of_token + size_t(head.key_head) * lane.of_head + of_part
                                : head.at(p.v, p.value_dim, of_part);
        to = (is_query ? memory.query : is_key ? memory.key : memory.value) + of_part;
        index = is_query || is_key ? (is_key ? keys : 0) + head.key_head * p.key_dim + of_part
                                   : 2 * keys + head.head * p.value_dim + of_part;
    }

    // Tokens that a shorter convolution does not see weigh nothing.
    __device__ __forceinline__ void load(const CqDeltaNet &p, const float *seen, uint32_t channels, bool begins) {
        const uint32_t all = 2 * (p.value_heads / p.shared) * p.key_dim + p.value_heads * p.value_dim, none = KERNEL - p.kernel;
#pragma unroll
        for (int i = 0; i < KERNEL; ++i) {
            weight[i] = i < int(none) ? 0 : p.convolution[size_t(i - none) * all + index];
            if (i + 1 < KERNEL) older[i] = begins || i < int(none) ? 0 : seen[(i - none) * channels + threadIdx.x];
        }
    }

    __device__ __forceinline__ void convolve(float x) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i + 1 < KERNEL; ++i) sum = __fmaf_rn(older[i], weight[i], sum);
        sum = __fmaf_rn(x, weight[KERNEL - 1], sum);
#pragma unroll
        for (int i = 0; i + 2 < KERNEL; ++i) older[i] = older[i + 1];
        older[KERNEL - 2] = x;
        *to = activated(CQ_ACTIVATION_SILU, sum);
    }

    __device__ __forceinline__ void store(const CqDeltaNet &p, float *seen, uint32_t channels) const {
        const uint32_t none = KERNEL - p.kernel;
#pragma unroll
        for (int i = 0; i + 1 < KERNEL; ++i)
            if (i >= int(none)) seen[(i - none) * channels + threadIdx.x] = older[i];
    }
};

// By what a vector of `size` numbers is multiplied to have length 1; the same in every warp.
__device__ __forceinline__ float to_unit(const float *x, uint32_t size) {
    float squares = 0;
    for (uint32_t i = threadIdx.x % 32; i < size; i += 32) squares = __fmaf_rn(x[i], x[i], squares);
    return 1.f / sqrtf(sum_of_warp(squares) + LENGTH_EPS);
}

// What the threads of a column have found.
__device__ __forceinline__ float sum_of_column(const float *sums, const CqDeltaNet &p, uint32_t column) {
    float sum = 0;
    for (uint32_t group = 0; group < p.groups; ++group) sum += sums[group * p.value_dim + column];
    return sum;
}

__device__ __forceinline__ void delta_net_of_head(const CqDeltaNet &p) {
    CQ_DYNAMIC_SHARED(bytes);
    Memory &memory = *reinterpret_cast<Memory *>(bytes);
    const Head head(p);
    const uint32_t thread = threadIdx.x, channels = 2 * p.key_dim + p.value_dim;
    const uint32_t position = p.positions ? load_again(p.positions + blockIdx.y) : p.position;
    const bool begins = position == 0, is_there = position != 0xffffffffu;
    // Threads beyond all columns compute, too, with rows of zeros.
    const uint32_t column = thread % p.value_dim, group = min(thread / p.value_dim, p.groups - 1);
    const bool has_channel = thread < channels && is_there, has_column = thread < p.groups * p.value_dim && is_there;
    const size_t size = size_t(p.key_dim) * p.value_dim;
    float *const matrix = p.state + head.state * (size + (p.kernel - 1) * channels), *const seen = matrix + size;
    Channel channel(p, head, memory);
    float state[ROWS];
    const auto load_state = [&] {
        if (has_channel) channel.load(p, seen, channels, begins);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const uint32_t row = group + i * p.groups;
            state[i] = has_column && !begins && row < p.key_dim ? matrix[size_t(row) * p.value_dim + column] : 0;
        }
    };
    if (p.settled) load_state();
    for (uint32_t i = p.key_dim + thread; i < KEYS; i += THREADS) memory.query[i] = memory.key[i] = 0;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (!is_there) return;
    if (!p.settled) load_state();

    // What comes with a token.
    struct Coming {
        float x, gate, decay, beta;
    } next = {};
    const size_t gates = head.at(p.gate, p.value_dim, column), decays = head.at(p.decay, 1, 0), betas = head.at(p.beta, 1, 0);
    const auto load = [&](uint32_t token) {
        if (has_channel) next.x = load_float(channel.from, channel.at + size_t(token) * channel.of_token, p.dtype);
        next.gate = load_float(p.gate.x, gates + size_t(token) * p.gate.of_token, p.dtype);
        next.decay = load_float(p.decay.x, decays + size_t(token) * p.decay.of_token, p.dtype);
        next.beta = load_float(p.beta.x, betas + size_t(token) * p.beta.of_token, p.dtype);
    };
    const float rate = p.rates[head.head], gate_bias = p.gate_bias[head.head], weight = p.norm[column];
    const float length = 1.f / sqrtf(float(p.key_dim));
    const uint32_t place = p.tiled ? head.of_key * (p.value_heads / p.shared) + head.key_head : head.head;
    load(0);
#pragma unroll 1
    for (uint32_t token = 0; token < p.tokens; ++token) {
        const Coming now = next;
        if (token + 1 < p.tokens) load(token + 1);
        if (has_channel) channel.convolve(now.x);
        const float opened = now.decay + gate_bias;
        const float keep = expf(rate * (fmaxf(opened, 0.f) + log1pf(expf(-fabsf(opened)))));
        __syncthreads();
        const float of_query = to_unit(memory.query, p.key_dim) * length, of_key = to_unit(memory.key, p.key_dim);
        float known = 0, output = 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            state[i] *= keep;
            known = __fmaf_rn(state[i], memory.key[group + i * p.groups], known);
        }
        memory.known[thread] = known;
        __syncthreads();
        known = of_key * sum_of_column(memory.known, p, column);
        const float delta = of_key * (memory.value[column] - known) / (1.f + expf(-now.beta));
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const uint32_t row = group + i * p.groups;
            state[i] = __fmaf_rn(memory.key[row], delta, state[i]);
            output = __fmaf_rn(state[i], memory.query[row], output);
        }
        memory.output[thread] = output;
        __syncthreads();
        // Whole warps, of which each adds up all squares.
        if (thread / 32 * 32 < p.value_dim) {
            float squares = 0;
            for (uint32_t i = thread % 32; i < p.value_dim; i += 32) {
                const float y = of_query * sum_of_column(memory.output, p, i);
                squares = __fmaf_rn(y, y, squares);
            }
            const float scale = 1.f / sqrtf(sum_of_warp(squares) / float(p.value_dim) + p.eps);
            const float y = of_query * sum_of_column(memory.output, p, column) * scale * weight;
            const size_t at = ((head.first_row + token) * p.value_heads + place) * p.value_dim + column;
            if (thread < p.value_dim) store_float(p.y, at, p.dtype, y * activated(CQ_ACTIVATION_SILU, now.gate));
        }
    }
    if (has_channel) channel.store(p, seen, channels);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const uint32_t row = group + i * p.groups;
        if (has_column && row < p.key_dim) matrix[size_t(row) * p.value_dim + column] = state[i];
    }
}

}  // namespace

CQ_KERNEL(delta_net, CqDeltaNet, THREADS, 1) { delta_net_of_head(p); }
