/* The launch parameters of every kernel: plain C, so that Rust's side of them is generated (bindgen).
 *
 * Every kernel takes one struct, by value. Pointers are device pointers, all shapes row-major and
 * contiguous unless a stride is given; strides count elements. No struct has padding, whose bytes nobody sets: `unused`
 * is 0. */
#ifndef CANDLE_QUANT_PARAMS_H
#define CANDLE_QUANT_PARAMS_H
#include <stdint.h>

/* Element types of activations, outputs, scales, biases. */
enum CqDtype { CQ_F16 = 0, CQ_BF16 = 1, CQ_F32 = 2 };

/* What is between the projections of a feed-forward block. */
enum CqActivation {
    CQ_ACTIVATION_NONE = 0,
    CQ_ACTIVATION_SILU = 1,      /* x / (1 + exp(-x)) */
    CQ_ACTIVATION_GELU = 2,      /* x times the distribution function of a normal variable */
    CQ_ACTIVATION_GELU_TANH = 3, /* the same, approximated by tanh */
    CQ_ACTIVATION_RELU2 = 4,     /* the square of positive numbers */
};

/* What becomes of an output before a residual is added: these, in this order. */
typedef struct CqFinish {
    uint32_t activation; /* CqActivation */
    float limit;         /* outputs end at it and its negative; 0: they do not */
    float factor;        /* they are multiplied by it */
    float softcap;       /* they become softcap * tanh(output / softcap); 0: they do not */
} CqFinish;

#define CQ_MAX_WEIGHTS 4

/* Threads of a block, but for those of attention. */
#define CQ_THREADS 256
#define CQ_ATTEND_THREADS 128

/* All shared memory is dynamic: a launch asks for all that a block has. In bytes: */
#define CQ_SIMT_SHARED_BYTES 18432    /* of the fp32 matmuls: x of one step */
#define CQ_QUANTIZE_SHARED_BYTES 1024 /* of quantization: a block's codes */
#define CQ_NORM_SHARED_BYTES 64       /* of norms: sums of warps, twice */
#define CQ_SCAN_SHARED_BYTES 64       /* of sums over a block's threads, behind what else a kernel has */

#define CQ_SAMPLE_SHARED_BYTES 16480  /* of drawing: bins, sums, and what a block has found */

/* Numbers of x that a block of the dense matmuls of 1 and 2 rows has in shared memory; of 4 and 8 rows twice as many. */
#define CQ_DENSE_NUMBERS 4096

/* Experts whose logits a block of the choice makes, and the most that there are. */
#define CQ_ROUTE_EXPERTS 2
#define CQ_MOST_ROUTED_EXPERTS 1024

/* Bins of a histogram, and the most blocks of a row, in drawing; the id of a row whose logits have no meaning. */
#define CQ_SAMPLE_BINS 2048
#define CQ_SAMPLE_BLOCKS 256
#define CQ_NOT_FINITE 0xffffffffu

/* Where a sequence stands that has no new token. */
#define CQ_NO_POSITION 0xffffffffu

/* Rows of a weight that a block of the tile kernels multiplies, and elements of k at a time; blocks that share all tiles. */
#define CQ_TILE_ROWS 128
#define CQ_TILE_K 128

/* How codes lie in B fragments of the tile kernels (CqTilesX). */
#define CQ_ORDER_SPLIT 1   /* pairs of codes i and i + 4 of eight, else of neighbours */
#define CQ_ORDER_QUARTERS 2 /* four neighbours of each of two groups of 16, else eight */

/* Keys that a warp attends to at a time, and the most query heads of a block. */
#define CQ_ATTEND_KEYS 16
#define CQ_ATTEND_HEADS 8
/* Queries of a block that attends to the keys of a prompt. */
#define CQ_PROMPT_ROWS 64
/* The most splits of the keys, and the most tiles of keys that are not split. */
#define CQ_ATTEND_SPLITS 64
#define CQ_ATTEND_UNSPLIT 12

/* A packed weight [rows, k]. */
typedef struct CqMatrix {
    const uint32_t *packed; /* [rows, k * bits / 32] */
    const void *scales;     /* [rows, k / group]: of scale_dtype for formats with float scales, else one byte each */
    const void *biases;     /* the same shape, of biases_dtype or bytes; null unless affine; null for symmetric codes */
    const void *scale_units; /* [rows, k / 256] of f16: what the bytes of scales count; null: of no super-blocks */
    const void *bias_units;  /* the same of biases */
    float global_scale;     /* multiplies every output: of formats whose scales are bytes, else 1 */
    uint32_t rows;
    uint32_t scale_dtype;  /* CqDtype, for formats with float scales */
    uint32_t biases_dtype; /* CqDtype, for affine formats */
} CqMatrix;

/* A weight, its bias, and where its output goes. */
typedef struct CqOperand {
    CqMatrix matrix;
    const void *bias; /* [rows], of bias_dtype; may be null */
    void *y;          /* [m, rows], of x_dtype; rows y_stride apart */
    uint32_t y_stride;
    uint32_t bias_dtype;
} CqOperand;

/* y_i = x w_i^T (+ bias_i) for 1 to 16 rows of x and up to four weights, or y_0 = activation(x w_0^T + bias_0) * (x w_1^T +
 * bias_1), whose weights have the same rows. All weights of a launch share format, group size and k.
 *
 * Grid: (blocks that take turns at `blocks`, which cover the rows of every weight, splits of k: with several, a block each). */
typedef struct CqGemv {
    CqOperand operand[CQ_MAX_WEIGHTS];
    const void *x;        /* [m, k], 16-byte aligned rows */
    const float *norm;    /* [k]: x is divided by the root of its mean square and multiplied by these; null: it is not; in
                           * kernels of 16 rows it has to be */
    const void *residual; /* [m, rows of operand 0] of x_dtype, added to y_0; may be null */
    float *partial;       /* [splits][blocks][rows per block + 1][rows of x]: used if splits > 1 */
    uint32_t *arrivals;   /* [blocks], zero before and after: used if splits > 1 */
    uint32_t operands;
    uint32_t m;
    uint32_t k;
    uint32_t k_per_split; /* a multiple of the kernel's round */
    uint32_t x_stride;
    uint32_t residual_stride;
    uint32_t x_dtype;
    uint32_t gated;       /* whether there is the y_0 of two weights alone */
    float eps;            /* added to the mean square */
    CqFinish finish;      /* of y_0; of the others all but the activation */
    uint32_t blocks;
} CqGemv;

/* The fp32 matmul on CUDA cores: any m, any k that is whole groups. */
typedef struct CqSimt {
    CqOperand operand;
    const void *x; /* [m, k] */
    uint32_t m;
    uint32_t k;
    uint32_t group_size;
    uint32_t x_stride;
    uint32_t x_dtype;
    uint32_t unused;
} CqSimt;

/* y_i = x w_i^T (+ bias_i) for up to four dense weights of one dtype, or y_0 = activation(x w_0^T + bias_0) * (x w_1^T +
 * bias_1), whose weights have the same rows.
 *
 * Grid: (blocks that take turns at pairs of rows, rows of x by those of the kernel). */
typedef struct CqDense {
    const void *weight[CQ_MAX_WEIGHTS];  /* [rows, k] of weight_dtype */
    const float *bias[CQ_MAX_WEIGHTS];   /* [rows]; may be null */
    void *y[CQ_MAX_WEIGHTS];             /* [m, rows] of x_dtype */
    const void *x;        /* [m, k] of x_dtype */
    const float *norm;    /* [k]: x is divided by the root of its mean square and multiplied by these; null: it is not */
    const void *residual; /* [m, rows of weight 0] of x_dtype, added to y_0; may be null */
    uint32_t rows[CQ_MAX_WEIGHTS];
    uint32_t operands;
    uint32_t pairs;       /* of rows: two of a weight, the last one by itself if they are odd; if gated, one of each */
    uint32_t gated;       /* whether there is the y_0 of two weights alone */
    uint32_t m;
    uint32_t k;
    uint32_t x_dtype;
    uint32_t weight_dtype;
    float eps;            /* added to the mean square */
    CqFinish finish;      /* of y_0; of the others all but the activation */
} CqDense;

/* Rows of a dense table, times a number: zeros for ids below `vocabulary` whose rows others have, NaN for ids beyond. Grid: (count,
 * ceil(k / 256)). */
typedef struct CqEmbed {
    const void *table;   /* [rows, k] of table_dtype: those of the ids first_row .. first_row + rows */
    const uint32_t *ids; /* [count] */
    void *y;             /* [count, k] of y_dtype */
    uint32_t first_row;
    uint32_t rows;
    uint32_t vocabulary;
    uint32_t k;
    uint32_t table_dtype;
    uint32_t y_dtype;
    float factor;
    uint32_t unused;
} CqEmbed;

/* What joins the gate and up projections of an expert, which have the same rows. */
enum CqGating {
    CQ_NOT_GATED = 0, /* a down projection */
    CQ_SILU = 1,      /* silu(gate) * up */
    CQ_CLAMPED = 2,   /* g * sigmoid(alpha g) * (u + 1), g = min(gate, limit), u = clamp(up, -limit, limit) */
};

/* Pairs that one block multiplies: those at order[first] .. order[first + count], all of one expert. */
typedef struct CqTile {
    uint32_t expert;
    uint32_t first;
    uint32_t count;
} CqTile;

/* One projection, or two joined, of the experts that tokens chose. A pair is a token and one of its experts.
 *
 * The matrix of an operand is that of expert 0; those of the others follow it, as do their biases. An expert that
 * does not exist is not read: it makes NaN. */
typedef struct CqExperts {
    CqOperand operand[2];           /* gate and up, y for both that of gate; or down */
    const float *global_scale[2]; /* [experts], beside that of the matrix; may be null */
    const uint32_t *ids;          /* [pairs] */
    const float *routing_weights; /* [pairs]: of down projections, factors in the sum of a token; null: no sums, y has pairs. Of
                                   * gate and up, factors of x; null: 1 */
    const void *residual;         /* [sums, rows] of y_dtype, added to them; may be null */
    const uint32_t *order;        /* [pairs]: pairs, those of one expert together; null: as they are */
    const CqTile *tiles;          /* [tile_count]; used if there is an order, else each pair is a tile */
    const uint32_t *tile_count;
    const void *x;                /* [pairs / pairs_of_x, k] of x_dtype */
    float *partial;               /* [sums][blocks][parts of a sum][16]: used if a sum has several parts */
    uint32_t *arrivals;           /* [sums][blocks], zero before and after: used if a sum has several parts */
    uint32_t pairs_of_x;          /* pairs that share a row of x */
    uint32_t experts;
    uint32_t top_k;
    uint32_t splits;              /* of k */
    uint32_t k;
    uint32_t k_per_split;         /* a multiple of the kernel's round */
    uint32_t group_size;
    uint32_t x_dtype;
    uint32_t y_dtype;
    uint32_t gating;              /* CqGating */
    float alpha;
    float limit;
    float factor;                 /* of sums */
    uint32_t unused;
} CqExperts;

/* x as the tile kernels take it: rows of halves, whose elements lie in the order of B fragments, and sums over groups.
 *
 * A row is multiplied by a power of two that brings its largest finite magnitude to [2^14, 2^15), unless it is f16 without a
 * norm; elements down to 2^-28 of that maximum stay as exact as a half is, smaller ones lose at most 2^-39 of it. Of an f32
 * there may be a second row for each, of what the halves leave. Grid: (m). */
typedef struct CqTilesX {
    const void *x;       /* [m, k] of x_dtype, 16-byte aligned rows */
    const float *norm;   /* [k]: x is divided by the root of its mean square and multiplied by these; null: it is not */
    void *halves;        /* [m * terms, k_padded]: zeros behind k */
    float *units;        /* [m * terms]: what 1 of the halves stands for */
    float *sums;         /* [m * terms, k_padded / group], of the halves */
    uint32_t k;
    uint32_t k_padded;   /* a multiple of CQ_TILE_K */
    uint32_t x_stride;
    uint32_t x_dtype;
    uint32_t group;      /* 16, 32 or 64 */
    uint32_t order;      /* CQ_ORDER_SPLIT, CQ_ORDER_QUARTERS or both */
    uint32_t terms;      /* 1 or 2 */
    float eps;           /* added to the mean square */
} CqTilesX;

/* y = x w^T, or what gate and up make of it; of experts, of the pairs that have chosen them.
 *
 * The matrix of an operand is that of expert 0, or the only one; those of other experts follow it, as do their biases. Scales and
 * biases have 16 bits or less; symmetric weights with such scales have biases. An expert that does not exist is not read: it
 * makes NaN. Grid: (blocks that share all steps of all tiles). */
typedef struct CqTiles {
    CqOperand operand[2];           /* one weight, twice; or gate and up, y for both that of gate */
    const void *halves;             /* x, as CqTilesX has made it */
    const float *units;
    const float *sums;
    const float *global_scale[2];   /* [experts], beside that of the matrix; may be null */
    const uint32_t *order;          /* [pairs]: pairs, those of one expert together; null: there are no experts */
    const CqTile *tiles;            /* [tile_count], of columns / terms pairs at most; used if there is an order */
    const uint32_t *tile_count;
    const void *residual;           /* [m, rows] of y_dtype, added to y; may be null */
    float *partial;                 /* [blocks][2][columns][CQ_TILE_ROWS] */
    uint32_t *arrivals;             /* [blocks], zero before and after */
    uint32_t m;                     /* rows of y; used if there is no order */
    uint32_t terms;                 /* rows of halves that add up to one of x */
    uint32_t k;
    uint32_t k_padded;
    uint32_t words_of_row;          /* of packed weights; those of all experts count up to 2^32, as do groups */
    uint32_t log_group_size;
    uint32_t columns;               /* rows of halves of a block: a multiple of 16, of more than 32 one of 32 */
    uint32_t stages;                /* steps on their way or at hand: 2 to 4 */
    uint32_t whole_copies;          /* 1: rows of packed weights begin at multiples of 16 bytes */
    uint32_t pairs_of_x;            /* pairs that share a row of x; 1 without experts */
    uint32_t experts;
    uint32_t gating;                /* CqGating; CQ_SILU here says no more than that the activation of gate multiplies up */
    uint32_t y_dtype;
    float alpha;
    float limit;
    CqFinish finish;                /* of y */
    uint32_t unused;
} CqTiles;

/* Brings pairs of the same expert together, in tiles of up to rows_of_tile. */
typedef struct CqSortPairs {
    const uint32_t *ids;  /* [pairs]; those that no expert has come last, as those of expert `experts` */
    uint32_t *order;      /* [pairs] */
    CqTile *tiles;        /* room for pairs / rows_of_tile + min(experts + 1, pairs) */
    uint32_t *tile_count;
    uint32_t pairs;
    uint32_t experts;     /* 1023 at most */
    uint32_t rows_of_tile;
    uint32_t unused;
} CqSortPairs;

/* y_t = residual_t + factor * sum over i of routing_weights[t, i] z[t, i], in that order. */
typedef struct CqWeightedSum {
    const float *z;               /* [tokens, top_k, rows] */
    const float *routing_weights; /* [tokens, top_k] */
    const void *residual;         /* [tokens, rows] of y_dtype; may be null */
    void *y;                      /* [tokens, rows] of y_dtype */
    uint32_t top_k;
    uint32_t rows;
    uint32_t y_dtype;
    float factor;
} CqWeightedSum;

/* The experts that each token chooses: those of the largest scores, of several alike the first.
 *
 * Grid: (blocks that share the experts and the numbers of a row, tokens). The last of a token's blocks to arrive chooses. */
typedef struct CqRoute {
    const void *x;           /* [tokens, hidden] of dtype */
    const float *norm;       /* [hidden]: x is divided by the root of its mean square and multiplied by these; null: it is not */
    void *normed;            /* [tokens, hidden] of dtype: what it becomes then */
    const void *weight;      /* [experts, hidden] of weight_dtype: makes logits */
    const float *bias;       /* [experts]; may be null */
    const float *correction; /* [experts], added to scores for the choice; may be null */
    const void *shared_gate; /* [hidden] of shared_gate_dtype: makes a logit of its own, whose sigmoid is what `shared` counts; may be null */
    void *shared;            /* [tokens, shared_width] of dtype: multiplied by that; used if there is one */
    float *logits;           /* [tokens, experts], or behind those of a token the one of `shared` */
    uint32_t *arrivals;      /* [tokens], zero before and after */
    uint32_t *ids;           /* [tokens, top_k], the largest score first */
    float *shares;           /* [tokens, top_k], how much each counts */
    uint32_t hidden;
    uint32_t experts;
    uint32_t top_k;
    uint32_t groups;         /* of as many experts each, of which some are chosen first; 0: there are none */
    uint32_t chosen_groups;
    uint32_t summed;         /* scores of a group that it is chosen by the sum of: its largest, 1 or 2 */
    uint32_t sigmoid;        /* 1: scores are sigmoids; else a softmax over all experts */
    uint32_t normalize;      /* 1: scores of the chosen experts are made to add up to 1 */
    float scale;             /* of scores, then */
    float eps;               /* added to the mean square */
    uint32_t dtype;
    uint32_t weight_dtype;
    uint32_t shared_width;
    uint32_t shared_gate_dtype;
    float shared_bias;       /* added to the logit of `shared` */
    uint32_t unused;
} CqRoute;

/* What a norm of heads makes of each. */
enum CqHeadNormKind {
    CQ_HEADS_AS_THEY_ARE = 0,
    CQ_HEADS_RMS = 1,   /* x / sqrt(mean of squares + eps) * weight + bias */
    CQ_HEADS_LAYER = 2, /* the same of x - mean(x) */
};

/* A norm of queries, or of keys. */
typedef struct CqHeadNorm {
    const float *weight; /* of elements; null: 1 */
    const float *bias;   /* null: 0 */
    uint32_t stride;     /* from the numbers of a head to those of the next: 0, or head_dim */
    uint32_t kind;       /* CqHeadNormKind */
    float eps;
    uint32_t unused;
} CqHeadNorm;

/* Attention of one new token of each sequence to those before it and itself; its key and value are appended.
 *
 * Rows of heads begin at multiples of 16 bytes. A share is eight query heads (or fewer) of one key head of one sequence.
 * Queries and keys are normalized and turned by their position first, and rounded once. Of a sequence for whose position the
 * cache or the tables have no row (0xffffffff says that it has no new token) nothing is read or written.
 *
 * Grid: (splits of the keys, shares). Blocks of splits that a sequence is too short for have nothing to do. */
typedef struct CqAttend {
    const void *q;      /* [sequences, heads, head_dim]; gated: [sequences, heads, 2, head_dim], of a query and its gate */
    const void *k;      /* [sequences, kv_heads, head_dim], the new keys */
    const void *v;      /* the same shape */
    void *keys;         /* [sequences, kv_heads, capacity, head_dim]: the cache, of which the position's row is written */
    void *values;       /* the same shape */
    void *key_groups;   /* [sequences, kv_heads, capacity, groups] of scale and bias in f16, of a cache of codes */
    void *value_groups; /* the same, as many as values have */
    const float *sinks; /* [heads], logits of one more key, which has no value; may be null */
    void *y;            /* [sequences, heads, head_dim] */
    float *partial;     /* [shares][splits of the grid][8][head_dim + 2]: used if a sequence has several splits */
    uint32_t *arrivals; /* [shares], zero before and after: used if a sequence has several splits */
    const uint32_t *positions; /* [sequences], of the new tokens, written two launches ago or more; null: all `position` */
    const float *turns;  /* [turn_rows][pairs]: cosines and sines; used if there are pairs */
    const float *growth; /* [turn_rows]: factors of queries; null: 1 */
    CqHeadNorm q_norm;
    CqHeadNorm k_norm;
    uint32_t group;     /* query heads of a key head */
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t capacity;  /* a multiple of 16; of a ring of 64, with 64 rows more than a token sees, or more */
    uint32_t position;  /* of all new tokens, without `positions` */
    uint32_t settled;   /* rows of the cache that were there before the kernel ahead was launched; with `positions` all are */
    uint32_t window;    /* tokens that a new one sees, itself included; 0: all */
    uint32_t chunked;   /* 1: it sees those from the last multiple of `window` on */
    uint32_t splits;    /* the most of a sequence: blocks of the grid for a share, or more */
    uint32_t stages;    /* tiles that a warp has on their way or at hand: 1 or 2 */
    uint32_t turn_rows;
    uint32_t pairs;     /* elements i and i + pairs turn together; those from 2 * pairs on do not */
    uint32_t interleaved; /* 1: elements 2i and 2i + 1 do, and become elements i and i + pairs */
    uint32_t turns_first; /* 1: norms come behind the turn */
    float scale;        /* of scores, which are logits of base 2 if there is no cap */
    float cap;          /* scores become cap * tanh(score), which are logits of base 2; 0: they stay */
    uint32_t dtype;     /* of q, k, v and y; of the cache, too, unless that has codes */
    uint32_t ring;      /* 1: a position's row is what is left of it divided by capacity; not for f32 */
    uint32_t gated;     /* 1: outputs are multiplied by the sigmoids of gates */
    uint32_t unused;
} CqAttend;

/* Of a block of linear attention: so many rows of a column of the state has a thread, at most, and so many threads share a column;
 * channels of the convolution, which sees so many tokens, at most. */
#define CQ_DELTA_ROWS 64
#define CQ_DELTA_GROUPS 16
#define CQ_DELTA_CHANNELS 512
#define CQ_DELTA_KERNEL 4
/* Queries and keys, filled up to whole rows of all threads; values; sums of threads, twice; weights and last tokens of channels. */
#define CQ_DELTA_SHARED_BYTES 26624

/* Where heads of tokens are: those of the first head of keys of the first token at `x`. */
typedef struct CqLane {
    const void *x;
    uint32_t of_token; /* elements from one token to the next */
    uint32_t of_head;  /* and from one head of keys to the next */
} CqLane;

/* Linear attention by the gated delta rule, of `tokens` tokens of each sequence, between its projections.
 *
 * Grid: (heads of values, sequences). value_dim <= CQ_THREADS, 2 key_dim + value_dim <= CQ_DELTA_CHANNELS, kernel <=
 * CQ_DELTA_KERNEL, key_dim <= groups * CQ_DELTA_ROWS. If it starts early, the state was there before the kernel ahead was
 * launched. */
typedef struct CqDeltaNet {
    CqLane q;
    CqLane k;
    CqLane v;     /* of a head of keys the heads of values that share it, one after another, as of what follows */
    CqLane gate;
    CqLane decay;
    CqLane beta;
    const float *convolution; /* [kernel][channels]: all queries, all keys, all values */
    const float *rates;       /* [value_heads] */
    const float *gate_bias;   /* [value_heads] */
    const float *norm;        /* [value_dim] */
    float *state;    /* [sequences, value_heads] of a matrix [key_dim, value_dim], and behind it what the convolution still sees,
                        [kernel - 1, 2 key_dim + value_dim] */
    void *y;         /* [sequences, tokens, value_heads, value_dim] of dtype, as all that lanes have */
    const uint32_t *positions; /* [sequences], of the first tokens, written two launches ago or more; null: all `position` */
    uint32_t position;    /* 0: a text begins, whatever its state is */
    uint32_t tokens;
    uint32_t value_heads;
    uint32_t shared;      /* heads of values for each one of keys */
    uint32_t key_dim;
    uint32_t value_dim;
    uint32_t kernel;      /* tokens that the convolution sees */
    uint32_t groups;      /* threads that share a column of the state: CQ_DELTA_GROUPS or CQ_THREADS / value_dim, what is less */
    uint32_t tiled;       /* 1: y has the first head of values of each head of keys, then the second of each, and so on */
    uint32_t dtype;
    float eps;            /* added to the mean square of an output */
    uint32_t unused;
} CqDeltaNet;

/* Attention of `tokens` new tokens of each sequence, at `position` and behind, to a cache that has their keys and values.
 *
 * A position's row is what is left of it divided by capacity, which a cache without a window never is smaller than. Rows of heads
 * begin at multiples of 16 bytes. Grid: (ceil(tokens * group / CQ_PROMPT_ROWS), sequences * kv_heads); with heads of 256 elements, a
 * block has half as many rows. */
typedef struct CqAttendPrompt {
    const void *q;            /* [sequences, tokens, heads, head_dim] */
    const void *keys;         /* [sequences, kv_heads, capacity, head_dim], of the dtype of q, or codes */
    const void *values;       /* the same shape */
    const void *key_groups;   /* [sequences, kv_heads, capacity, groups] of scale and bias in f16, of a cache of codes */
    const void *value_groups; /* the same, as many as values have */
    const float *sinks;       /* [heads], logits of one more key, which has no value; may be null */
    void *y;                  /* [sequences, tokens, heads, head_dim] */
    const uint32_t *places;   /* [sequences] of the sequence's number in the cache and the position of its first token, copied behind
                                 the launch ahead or written before it; null: its own number, and `position` */
    uint32_t tokens;
    uint32_t position;   /* of the first token of all sequences, without `places` */
    uint32_t group;      /* query heads of a key head */
    uint32_t kv_heads;
    uint32_t capacity;   /* a multiple of 64, with room for all that the tokens see */
    uint32_t window;     /* tokens that one sees, itself included; 0: all */
    uint32_t chunked;    /* 1: it sees those from the last multiple of `window` on */
    uint32_t dtype;      /* of q and y; the rest is of kernels for codes */
    uint32_t key_bits;   /* 8 or 4 */
    uint32_t value_bits;
    uint32_t stages;     /* of codes on their way or at hand: 1 or 2 */
    uint32_t unused;
    float scale;         /* of scores, which are logits of base 2 if there is no cap */
    float cap;           /* scores become cap * tanh(score), which are logits of base 2; 0: they stay */
} CqAttendPrompt;

/* Keys and values of `tokens` new tokens of each sequence, as codes, in the rows of `position` and behind.
 *
 * Grid: (ceil(tokens / 4), sequences * kv_heads), 128 threads. */
typedef struct CqAppend {
    const void *k;      /* [sequences, tokens, kv_heads, head_dim] of dtype */
    const void *v;      /* the same */
    void *keys;         /* [sequences, kv_heads, capacity, head_dim] codes */
    void *values;       /* the same */
    void *key_groups;   /* [sequences, kv_heads, capacity, groups] of scale and bias in f16 */
    void *value_groups; /* the same, as many as values have */
    const uint32_t *places; /* as those of CqAttendPrompt */
    uint32_t tokens;
    uint32_t position;
    uint32_t kv_heads;
    uint32_t capacity;
    uint32_t key_bits;  /* 8 or 4 */
    uint32_t value_bits;
    uint32_t dtype;
    uint32_t unused;
} CqAppend;

/* Rows of a weight, dequantized: all of them, or those named by ids. */
typedef struct CqDequantize {
    CqMatrix matrix;
    const void *ids;    /* [count] of ids_bytes: embedding; null: rows first_row .. first_row + count */
    void *y;            /* [count, k] of y_dtype */
    uint64_t first_row; /* with ids: the id of the first row */
    uint64_t vocabulary; /* ids below, whose rows others have, give zeros; those beyond NaN */
    uint32_t count;
    uint32_t k;
    uint32_t group_size;
    uint32_t ids_bytes; /* 1, 4 or 8: U8, U32, I64 */
    uint32_t y_dtype;
    float factor;       /* of all numbers */
} CqDequantize;

/* y = residual + factor * ((x - mean of x) / root of its mean square * weight + bias), for each row.
 *
 * y may be x, or the residual. With columns, y has the numbers of these in turn, and zeros for those beyond all; there is no
 * residual then, and y is another. Grid: (rows). */
typedef struct CqNorm {
    const void *x;           /* [rows, width] of dtype */
    const float *weight;     /* [width]; may be null */
    const float *bias;       /* [width]; may be null */
    const void *residual;    /* [rows, width] of dtype; may be null */
    void *y;                 /* [rows, y_width] of dtype */
    const uint32_t *columns; /* [y_width]; null for norm_rows */
    uint32_t width;
    uint32_t y_width;
    uint32_t normalizes;     /* if not, x is only multiplied; order_rows alone looks at it */
    uint32_t subtracts_mean;
    float eps;               /* added to the mean square */
    float factor;
    uint32_t dtype;
    uint32_t unused;
} CqNorm;

/* y = residual + finish(x), element by element; with up, that is multiplied by it behind the activation.
 *
 * y may be x, up or the residual. Grid: (count / 256, rounded up). */
typedef struct CqElementwise {
    const void *x;         /* [count] of dtype */
    const void *up;        /* the same; may be null */
    const void *residual;  /* [count] of dtype; may be null */
    void *y;               /* [count] of dtype */
    CqFinish finish;
    uint32_t count;
    uint32_t dtype;
} CqElementwise;

/* Quantizes rows as the CPU does, bit for bit. */
typedef struct CqQuantize {
    const void *weights; /* [rows, k] of dtype */
    uint32_t *packed;    /* [rows, k * bits / 32] */
    void *scales;        /* [rows, k / group] of dtype (float scales) or bytes */
    void *biases;        /* [rows, k / group] of dtype (affine) */
    float absmax;        /* NVFP4: the tensor's, or 0 for none */
    uint32_t unused;
    uint64_t groups;     /* rows * k / group */
    uint32_t group_size;
    uint32_t dtype;
} CqQuantize;

/* Every row of y becomes the bias, to which a dense matmul is then added. */
typedef struct CqFillBias {
    const void *bias; /* [rows], of bias_dtype */
    void *y;          /* [m, rows], of y_dtype */
    uint32_t rows;
    uint32_t m;
    uint32_t bias_dtype;
    uint32_t y_dtype;
} CqFillBias;

/* The largest magnitude of numbers, NaN if there is one. */
typedef struct CqAbsmax {
    const void *numbers; /* [count], of dtype */
    uint32_t *bits;      /* of the f32 result; zero before */
    uint64_t count;
    uint32_t dtype;
    uint32_t unused;
} CqAbsmax;

/* What is known of a row of logits in the course of a draw. */
typedef struct CqSampleRow {
    uint64_t largest;     /* the key of the largest logit, then the complement of its token */
    uint64_t need;        /* top-p: what weights from `weight` on have to come to */
    uint32_t arrivals;    /* blocks that have added their part */
    uint32_t logit_key;   /* top-k: that of the k-th largest logit, or its first bits; else 0 */
    uint32_t logit_ties;  /* how many of those like it are kept, the first ones */
    uint32_t weight;      /* top-p: the least that is kept, or its first bits; else 0 */
    uint32_t weight_ties; /* how many of those like it are kept, the first ones */
    uint32_t unused;
} CqSampleRow;

/* What neighbouring tokens weigh. */
typedef struct CqSampleShare {
    uint64_t above;       /* all that are kept whatever there is beside */
    uint32_t logit_ties;  /* how many are like the k-th largest logit */
    uint32_t weight_ties; /* how many others are like the least weight that is kept */
} CqSampleShare;

/* A token for each row of logits. */
typedef struct CqSample {
    const void *logits;    /* [rows, vocabulary] of dtype */
    uint32_t *ids;         /* [rows] */
    CqSampleRow *rows;     /* [rows], zero before and after */
    uint64_t *bins;        /* [rows, CQ_SAMPLE_BINS], zero before and after; used if top_k or top_p */
    CqSampleShare *shares; /* [rows, CQ_SAMPLE_BLOCKS] */
    const uint64_t *draw;  /* seed and step, on the device; null: those that follow */
    uint64_t seed;
    uint64_t step;
    uint64_t top_p;        /* in units of 2^-32; used by sample_weights */
    uint32_t vocabulary;
    uint32_t share;        /* logits of a block */
    uint32_t dtype;
    uint32_t top_k;        /* less than vocabulary; used by sample_logits */
    uint32_t least_weight; /* at least 1 */
    uint32_t digit;        /* of three, the highest first: used by sample_logits and sample_weights */
    float temperature;
    uint32_t unused;
} CqSample;
#endif
