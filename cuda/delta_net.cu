// delta_net, delta_net_d128: linear attention by the gated delta rule, with the convolution before it and the norm and the gates behind
// (CqDeltaNet).
//
// A block has a head of values of a sequence, token by token, and the head's state [key_dim, value_dim] in registers: `groups`
// threads share a column, each with ROWS neighbouring rows. A column changes by itself, so the only sums over threads are those
// over the rows of a column: what the state has for a key, and what the query sees. They are added up in the order of threads.
//
// Each thread convolves two channels, whose weights and last tokens it keeps in shared memory; inputs of the next token are on their
// way while this one is computed. Nothing of the state depends on what earlier kernels of the step do, so that it is read before they have
// finished.
#include "finish.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_THREADS, ROWS = CQ_DELTA_ROWS, KERNEL = CQ_DELTA_KERNEL, SLOTS = CQ_DELTA_CHANNELS / THREADS;
constexpr int KEYS = CQ_DELTA_GROUPS * ROWS;  // of a query or key in shared memory, zeros behind its end
constexpr float LENGTH_EPS = 1e-6f;

// Elements of heads, and threads of a column. DIM: those of all heads, which fill whole threads; or 0 if only the launch knows them.
template <uint32_t DIM> struct Sizes {
    static constexpr uint32_t OF_COLUMN = THREADS / (DIM ? DIM : 1);
    static_assert(DIM == 0 || (OF_COLUMN * DIM == THREADS && OF_COLUMN * ROWS == DIM), "no thread has less to do");
    uint32_t key_dim, value_dim, groups, channels;
    __device__ __forceinline__ explicit Sizes(const CqDeltaNet &p)
        : key_dim(DIM ? DIM : p.key_dim), value_dim(DIM ? DIM : p.value_dim), groups(DIM ? OF_COLUMN : p.groups),
          channels(2 * key_dim + value_dim) {}
};

// What threads tell each other, and what each keeps there of its channels.
struct Memory {
    float query[KEYS], key[KEYS], value[CQ_DELTA_CHANNELS];
    float known[THREADS], output[THREADS];  // sums of each thread
    float weight[KERNEL][CQ_DELTA_CHANNELS], older[KERNEL - 1][CQ_DELTA_CHANNELS];  // the oldest token first
};
static_assert(CQ_DELTA_SHARED_BYTES == sizeof(Memory), "what a launch asks for");

// What a head of values is.
struct Head {
    uint32_t head, key_head, of_key;  // the last: which of those that share it
    uint32_t first_row;               // of the tokens of all sequences

    __device__ __forceinline__ explicit Head(const CqDeltaNet &p) {
        head = blockIdx.x, key_head = head / p.shared, of_key = head - key_head * p.shared, first_row = blockIdx.y * p.tokens;
    }

    // Where number `index` of what the head has of a lane is, `size` numbers of each head of values.
    __device__ __forceinline__ uint32_t at(const CqLane &lane, uint32_t size, uint32_t index) const {
        return first_row * lane.of_token + key_head * lane.of_head + of_key * size + index;
    }
};

// A channel of the convolution, number `of_head` of those of its head: where it comes from, and where it goes.
struct Channel {
    const void *x;
    uint32_t at, of_token;
    float *to;

    // Tokens that a shorter convolution does not see weigh nothing.
    template <class Sizes>
    __device__ __forceinline__ void begin(const CqDeltaNet &p, const Sizes &sizes, const Head &head, Memory &memory, uint32_t of_head, const float *seen) {
        const uint32_t keys = p.value_heads / p.shared * sizes.key_dim, all = 2 * keys + p.value_heads * sizes.value_dim;
        const uint32_t none = KERNEL - p.kernel;
        const bool is_value = of_head >= 2 * sizes.key_dim, is_key = !is_value && of_head >= sizes.key_dim;
        const uint32_t i = of_head - (is_value ? 2 * sizes.key_dim : is_key ? sizes.key_dim : 0);
        const CqLane &lane = is_value ? p.v : is_key ? p.k : p.q;
        x = lane.x, of_token = lane.of_token, at = head.at(lane, is_value ? sizes.value_dim : 0, i);
        to = (is_value ? memory.value : is_key ? memory.key : memory.query) + i;
        const uint32_t of_values = 2 * keys + head.head * sizes.value_dim;
        const uint32_t channel = (is_value ? of_values : (is_key ? keys : 0) + head.key_head * sizes.key_dim) + i;
#pragma unroll
        for (int tap = 0; tap < KERNEL; ++tap) {
            const bool is_there = tap >= int(none);
            memory.weight[tap][of_head] = is_there ? p.convolution[size_t(tap - none) * all + channel] : 0;
            if (tap + 1 < KERNEL) memory.older[tap][of_head] = is_there && seen ? seen[(tap - none) * sizes.channels + of_head] : 0;
        }
    }

    __device__ __forceinline__ float load(uint32_t dtype) const { return load_float(x, at, dtype); }

    __device__ __forceinline__ void convolve(Memory &memory, uint32_t of_head, float x) const {
        float sum = 0;
#pragma unroll
        for (int tap = 0; tap + 1 < KERNEL; ++tap) {
            const float older = memory.older[tap][of_head];
            sum = __fmaf_rn(older, memory.weight[tap][of_head], sum);
            if (tap) memory.older[tap - 1][of_head] = older;
        }
        memory.older[KERNEL - 2][of_head] = x;
        *to = activated(CQ_ACTIVATION_SILU, __fmaf_rn(x, memory.weight[KERNEL - 1][of_head], sum));
    }
};

// By what a vector of `size` numbers is multiplied to have length 1; the same in every warp.
__device__ __forceinline__ float to_unit(const float *x, uint32_t size) {
    float squares = 0;
    for (uint32_t i = threadIdx.x % 32; i < size; i += 32) squares = __fmaf_rn(x[i], x[i], squares);
    return 1.f / sqrtf(sum_of_warp(squares) + LENGTH_EPS);
}

// What the threads of a column have found.
template <class Sizes> __device__ __forceinline__ float sum_of_column(const float *sums, const Sizes &sizes, uint32_t column) {
    float sum = 0;
    for (uint32_t group = 0; group < sizes.groups; ++group) sum += sums[group * sizes.value_dim + column];
    return sum;
}

template <uint32_t DIM> __device__ __forceinline__ void delta_net_of_head(const CqDeltaNet &p) {
    CQ_DYNAMIC_SHARED(bytes);
    Memory &memory = *reinterpret_cast<Memory *>(bytes);
    const Head head(p);
    const Sizes<DIM> sizes(p);
    const uint32_t thread = threadIdx.x, channels = sizes.channels;
    const uint32_t position = p.positions ? load_again(p.positions + blockIdx.y) : p.position;
    const bool begins = position == 0, is_there = position != CQ_NO_POSITION;
    // Threads beyond all columns compute, too, with rows of zeros.
    const uint32_t column = thread % sizes.value_dim, group = min(thread / sizes.value_dim, sizes.groups - 1);
    const uint32_t rows = thread < sizes.groups * sizes.value_dim ? sizes.key_dim : 0;
    const auto has_channel = [&](int slot) { return thread + slot * THREADS < channels && is_there; };
    const size_t size = size_t(sizes.key_dim) * sizes.value_dim;
    const size_t of_head = size_t(blockIdx.y) * p.value_heads + head.head;
    float *const matrix = p.state + of_head * (size + (p.kernel - 1) * channels), *const seen = matrix + size;
    Channel channel[SLOTS];
    float state[ROWS];
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot)
        if (has_channel(slot)) channel[slot].begin(p, sizes, head, memory, thread + slot * THREADS, begins ? nullptr : seen);
    float *const own = matrix + group * ROWS * sizes.value_dim + column;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (DIM) {
            state[i] = own[i * DIM];
            continue;
        }
        // A branch would wait for the loads before it: what is beyond the last row is loaded as that.
        const uint32_t row = group * ROWS + i;
        const float loaded = matrix[min(row, sizes.key_dim - 1) * sizes.value_dim + column];
        state[i] = row < rows ? loaded : 0;
    }
    if (begins)
#pragma unroll
        for (int i = 0; i < ROWS; ++i) state[i] = 0;
    if (DIM == 0)
        for (uint32_t i = sizes.key_dim + thread; i < KEYS; i += THREADS) memory.query[i] = memory.key[i] = 0;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (!is_there) return;

    // What comes with a token.
    struct Coming {
        float x[SLOTS], gate, decay, beta;
    } next = {};
    uint32_t gate = head.at(p.gate, sizes.value_dim, column), decay = head.at(p.decay, 1, 0), beta = head.at(p.beta, 1, 0);
    const auto load_next = [&] {
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
            if (!has_channel(slot)) continue;
            next.x[slot] = channel[slot].load(p.dtype);
            channel[slot].at += channel[slot].of_token;
        }
        next.gate = load_float(p.gate.x, gate, p.dtype), gate += p.gate.of_token;
        next.decay = load_float(p.decay.x, decay, p.dtype), decay += p.decay.of_token;
        next.beta = load_float(p.beta.x, beta, p.dtype), beta += p.beta.of_token;
    };
    const float rate = p.rates[head.head], gate_bias = p.gate_bias[head.head], weight = p.norm[column];
    const float length = 1.f / sqrtf(float(sizes.key_dim));
    const uint32_t place = p.tiled ? head.of_key * (p.value_heads / p.shared) + head.key_head : head.head;
    load_next();
#pragma unroll 1
    for (uint32_t token = 0; token < p.tokens; ++token) {
        const Coming now = next;
        if (token + 1 < p.tokens) load_next();
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot)
            if (has_channel(slot)) channel[slot].convolve(memory, thread + slot * THREADS, now.x[slot]);
        const float opened = now.decay + gate_bias;
        const float keep = expf(rate * (fmaxf(opened, 0.f) + log1pf(expf(-fabsf(opened)))));
        __syncthreads();
        const float of_query = to_unit(memory.query, sizes.key_dim) * length, of_key = to_unit(memory.key, sizes.key_dim);
        float known = 0, output = 0, odd = 0;
        const float *const keys = memory.key + group * ROWS, *const queries = memory.query + group * ROWS;
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
            const float4 key = *reinterpret_cast<const float4 *>(keys + i);
            state[i] *= keep, state[i + 1] *= keep, state[i + 2] *= keep, state[i + 3] *= keep;
            known = __fmaf_rn(state[i], key.x, known), odd = __fmaf_rn(state[i + 1], key.y, odd);
            known = __fmaf_rn(state[i + 2], key.z, known), odd = __fmaf_rn(state[i + 3], key.w, odd);
        }
        memory.known[thread] = known + odd;
        __syncthreads();
        odd = 0, known = of_key * sum_of_column(memory.known, sizes, column);
        const float delta = of_key * (memory.value[column] - known) / (1.f + expf(-now.beta));
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
            const float4 key = *reinterpret_cast<const float4 *>(keys + i), query = *reinterpret_cast<const float4 *>(queries + i);
            state[i] = __fmaf_rn(key.x, delta, state[i]), output = __fmaf_rn(state[i], query.x, output);
            state[i + 1] = __fmaf_rn(key.y, delta, state[i + 1]), odd = __fmaf_rn(state[i + 1], query.y, odd);
            state[i + 2] = __fmaf_rn(key.z, delta, state[i + 2]), output = __fmaf_rn(state[i + 2], query.z, output);
            state[i + 3] = __fmaf_rn(key.w, delta, state[i + 3]), odd = __fmaf_rn(state[i + 3], query.w, odd);
        }
        memory.output[thread] = output + odd;
        __syncthreads();
        // Whole warps, of which each adds up all squares.
        if (thread / 32 * 32 < sizes.value_dim) {
            float squares = 0;
            for (uint32_t i = thread % 32; i < sizes.value_dim; i += 32) {
                const float y = of_query * sum_of_column(memory.output, sizes, i);
                squares = __fmaf_rn(y, y, squares);
            }
            const float scale = 1.f / sqrtf(sum_of_warp(squares) / float(sizes.value_dim) + p.eps);
            const float y = of_query * sum_of_column(memory.output, sizes, column) * scale * weight;
            const size_t at = (size_t(head.first_row + token) * p.value_heads + place) * sizes.value_dim + column;
            if (thread < sizes.value_dim) store_float(p.y, at, p.dtype, y * activated(CQ_ACTIVATION_SILU, now.gate));
        }
    }
    // Each thread what it has put there.
    for (uint32_t i = thread; i < channels; i += THREADS)
        for (uint32_t tap = KERNEL - p.kernel; tap + 1 < KERNEL; ++tap)
            seen[(tap + p.kernel - KERNEL) * channels + i] = memory.older[tap][i];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (DIM)
            own[i * DIM] = state[i];
        else if (group * ROWS + i < rows)
            own[i * sizes.value_dim] = state[i];
    }
}

}  // namespace

CQ_KERNEL(delta_net, CqDeltaNet, THREADS, 1) { delta_net_of_head<0>(p); }
CQ_KERNEL(delta_net_d128, CqDeltaNet, THREADS, 1) { delta_net_of_head<128>(p); }
