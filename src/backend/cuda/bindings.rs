// Generated from cuda/params.h by `cargo run -p bindings`; do not edit.

pub const CQ_MAX_WEIGHTS: u32 = 4;
pub const CQ_THREADS: u32 = 256;
pub const CQ_ATTEND_THREADS: u32 = 128;
pub const CQ_SIMT_SHARED_BYTES: u32 = 18432;
pub const CQ_QUANTIZE_SHARED_BYTES: u32 = 1024;
pub const CQ_NORM_SHARED_BYTES: u32 = 64;
pub const CQ_SCAN_SHARED_BYTES: u32 = 64;
pub const CQ_SAMPLE_SHARED_BYTES: u32 = 16480;
pub const CQ_DENSE_NUMBERS: u32 = 4096;
pub const CQ_ROUTE_EXPERTS: u32 = 2;
pub const CQ_MOST_ROUTED_EXPERTS: u32 = 1024;
pub const CQ_SAMPLE_BINS: u32 = 2048;
pub const CQ_SAMPLE_BLOCKS: u32 = 256;
pub const CQ_NOT_FINITE: u32 = 4294967295;
pub const CQ_NO_POSITION: u32 = 4294967295;
pub const CQ_TILE_ROWS: u32 = 128;
pub const CQ_TILE_K: u32 = 128;
pub const CQ_ORDER_SPLIT: u32 = 1;
pub const CQ_ORDER_QUARTERS: u32 = 2;
pub const CQ_ATTEND_KEYS: u32 = 16;
pub const CQ_ATTEND_HEADS: u32 = 8;
pub const CQ_PROMPT_ROWS: u32 = 64;
pub const CQ_ATTEND_SPLITS: u32 = 64;
pub const CQ_ATTEND_UNSPLIT: u32 = 12;
pub const CQ_DELTA_ROWS: u32 = 64;
pub const CQ_DELTA_GROUPS: u32 = 16;
pub const CQ_DELTA_CHANNELS: u32 = 512;
pub const CQ_DELTA_KERNEL: u32 = 4;
pub const CQ_DELTA_SHARED_BYTES: u32 = 26624;
pub const CQ_F16: CqDtype = 0;
pub const CQ_BF16: CqDtype = 1;
pub const CQ_F32: CqDtype = 2;
pub type CqDtype = ::core::ffi::c_uint;
pub const CQ_ACTIVATION_NONE: CqActivation = 0;
pub const CQ_ACTIVATION_SILU: CqActivation = 1;
pub const CQ_ACTIVATION_GELU: CqActivation = 2;
pub const CQ_ACTIVATION_GELU_TANH: CqActivation = 3;
pub const CQ_ACTIVATION_RELU2: CqActivation = 4;
pub type CqActivation = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqFinish {
    pub activation: u32,
    pub limit: f32,
    pub factor: f32,
    pub softcap: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqFinish"][::core::mem::size_of::<CqFinish>() - 16usize];
    ["Alignment of CqFinish"][::core::mem::align_of::<CqFinish>() - 4usize];
    ["Offset of field: CqFinish::activation"][::core::mem::offset_of!(CqFinish, activation) - 0usize];
    ["Offset of field: CqFinish::limit"][::core::mem::offset_of!(CqFinish, limit) - 4usize];
    ["Offset of field: CqFinish::factor"][::core::mem::offset_of!(CqFinish, factor) - 8usize];
    ["Offset of field: CqFinish::softcap"][::core::mem::offset_of!(CqFinish, softcap) - 12usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqMatrix {
    pub packed: *const u32,
    pub scales: *const ::core::ffi::c_void,
    pub biases: *const ::core::ffi::c_void,
    pub scale_units: *const ::core::ffi::c_void,
    pub bias_units: *const ::core::ffi::c_void,
    pub global_scale: f32,
    pub rows: u32,
    pub scale_dtype: u32,
    pub biases_dtype: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqMatrix"][::core::mem::size_of::<CqMatrix>() - 56usize];
    ["Alignment of CqMatrix"][::core::mem::align_of::<CqMatrix>() - 8usize];
    ["Offset of field: CqMatrix::packed"][::core::mem::offset_of!(CqMatrix, packed) - 0usize];
    ["Offset of field: CqMatrix::scales"][::core::mem::offset_of!(CqMatrix, scales) - 8usize];
    ["Offset of field: CqMatrix::biases"][::core::mem::offset_of!(CqMatrix, biases) - 16usize];
    ["Offset of field: CqMatrix::scale_units"][::core::mem::offset_of!(CqMatrix, scale_units) - 24usize];
    ["Offset of field: CqMatrix::bias_units"][::core::mem::offset_of!(CqMatrix, bias_units) - 32usize];
    ["Offset of field: CqMatrix::global_scale"][::core::mem::offset_of!(CqMatrix, global_scale) - 40usize];
    ["Offset of field: CqMatrix::rows"][::core::mem::offset_of!(CqMatrix, rows) - 44usize];
    ["Offset of field: CqMatrix::scale_dtype"][::core::mem::offset_of!(CqMatrix, scale_dtype) - 48usize];
    ["Offset of field: CqMatrix::biases_dtype"][::core::mem::offset_of!(CqMatrix, biases_dtype) - 52usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqOperand {
    pub matrix: CqMatrix,
    pub bias: *const ::core::ffi::c_void,
    pub y: *mut ::core::ffi::c_void,
    pub y_stride: u32,
    pub bias_dtype: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqOperand"][::core::mem::size_of::<CqOperand>() - 80usize];
    ["Alignment of CqOperand"][::core::mem::align_of::<CqOperand>() - 8usize];
    ["Offset of field: CqOperand::matrix"][::core::mem::offset_of!(CqOperand, matrix) - 0usize];
    ["Offset of field: CqOperand::bias"][::core::mem::offset_of!(CqOperand, bias) - 56usize];
    ["Offset of field: CqOperand::y"][::core::mem::offset_of!(CqOperand, y) - 64usize];
    ["Offset of field: CqOperand::y_stride"][::core::mem::offset_of!(CqOperand, y_stride) - 72usize];
    ["Offset of field: CqOperand::bias_dtype"][::core::mem::offset_of!(CqOperand, bias_dtype) - 76usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqGemv {
    pub operand: [CqOperand; 4usize],
    pub x: *const ::core::ffi::c_void,
    pub norm: *const f32,
    pub residual: *const ::core::ffi::c_void,
    pub partial: *mut f32,
    pub arrivals: *mut u32,
    pub operands: u32,
    pub m: u32,
    pub k: u32,
    pub k_per_split: u32,
    pub x_stride: u32,
    pub residual_stride: u32,
    pub x_dtype: u32,
    pub gated: u32,
    pub eps: f32,
    pub finish: CqFinish,
    pub blocks: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqGemv"][::core::mem::size_of::<CqGemv>() - 416usize];
    ["Alignment of CqGemv"][::core::mem::align_of::<CqGemv>() - 8usize];
    ["Offset of field: CqGemv::operand"][::core::mem::offset_of!(CqGemv, operand) - 0usize];
    ["Offset of field: CqGemv::x"][::core::mem::offset_of!(CqGemv, x) - 320usize];
    ["Offset of field: CqGemv::norm"][::core::mem::offset_of!(CqGemv, norm) - 328usize];
    ["Offset of field: CqGemv::residual"][::core::mem::offset_of!(CqGemv, residual) - 336usize];
    ["Offset of field: CqGemv::partial"][::core::mem::offset_of!(CqGemv, partial) - 344usize];
    ["Offset of field: CqGemv::arrivals"][::core::mem::offset_of!(CqGemv, arrivals) - 352usize];
    ["Offset of field: CqGemv::operands"][::core::mem::offset_of!(CqGemv, operands) - 360usize];
    ["Offset of field: CqGemv::m"][::core::mem::offset_of!(CqGemv, m) - 364usize];
    ["Offset of field: CqGemv::k"][::core::mem::offset_of!(CqGemv, k) - 368usize];
    ["Offset of field: CqGemv::k_per_split"][::core::mem::offset_of!(CqGemv, k_per_split) - 372usize];
    ["Offset of field: CqGemv::x_stride"][::core::mem::offset_of!(CqGemv, x_stride) - 376usize];
    ["Offset of field: CqGemv::residual_stride"][::core::mem::offset_of!(CqGemv, residual_stride) - 380usize];
    ["Offset of field: CqGemv::x_dtype"][::core::mem::offset_of!(CqGemv, x_dtype) - 384usize];
    ["Offset of field: CqGemv::gated"][::core::mem::offset_of!(CqGemv, gated) - 388usize];
    ["Offset of field: CqGemv::eps"][::core::mem::offset_of!(CqGemv, eps) - 392usize];
    ["Offset of field: CqGemv::finish"][::core::mem::offset_of!(CqGemv, finish) - 396usize];
    ["Offset of field: CqGemv::blocks"][::core::mem::offset_of!(CqGemv, blocks) - 412usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqSimt {
    pub operand: CqOperand,
    pub x: *const ::core::ffi::c_void,
    pub m: u32,
    pub k: u32,
    pub group_size: u32,
    pub x_stride: u32,
    pub x_dtype: u32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqSimt"][::core::mem::size_of::<CqSimt>() - 112usize];
    ["Alignment of CqSimt"][::core::mem::align_of::<CqSimt>() - 8usize];
    ["Offset of field: CqSimt::operand"][::core::mem::offset_of!(CqSimt, operand) - 0usize];
    ["Offset of field: CqSimt::x"][::core::mem::offset_of!(CqSimt, x) - 80usize];
    ["Offset of field: CqSimt::m"][::core::mem::offset_of!(CqSimt, m) - 88usize];
    ["Offset of field: CqSimt::k"][::core::mem::offset_of!(CqSimt, k) - 92usize];
    ["Offset of field: CqSimt::group_size"][::core::mem::offset_of!(CqSimt, group_size) - 96usize];
    ["Offset of field: CqSimt::x_stride"][::core::mem::offset_of!(CqSimt, x_stride) - 100usize];
    ["Offset of field: CqSimt::x_dtype"][::core::mem::offset_of!(CqSimt, x_dtype) - 104usize];
    ["Offset of field: CqSimt::unused"][::core::mem::offset_of!(CqSimt, unused) - 108usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqDense {
    pub weight: [*const ::core::ffi::c_void; 4usize],
    pub bias: [*const f32; 4usize],
    pub y: [*mut ::core::ffi::c_void; 4usize],
    pub x: *const ::core::ffi::c_void,
    pub norm: *const f32,
    pub residual: *const ::core::ffi::c_void,
    pub rows: [u32; 4usize],
    pub operands: u32,
    pub pairs: u32,
    pub gated: u32,
    pub m: u32,
    pub k: u32,
    pub x_dtype: u32,
    pub weight_dtype: u32,
    pub eps: f32,
    pub finish: CqFinish,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqDense"][::core::mem::size_of::<CqDense>() - 184usize];
    ["Alignment of CqDense"][::core::mem::align_of::<CqDense>() - 8usize];
    ["Offset of field: CqDense::weight"][::core::mem::offset_of!(CqDense, weight) - 0usize];
    ["Offset of field: CqDense::bias"][::core::mem::offset_of!(CqDense, bias) - 32usize];
    ["Offset of field: CqDense::y"][::core::mem::offset_of!(CqDense, y) - 64usize];
    ["Offset of field: CqDense::x"][::core::mem::offset_of!(CqDense, x) - 96usize];
    ["Offset of field: CqDense::norm"][::core::mem::offset_of!(CqDense, norm) - 104usize];
    ["Offset of field: CqDense::residual"][::core::mem::offset_of!(CqDense, residual) - 112usize];
    ["Offset of field: CqDense::rows"][::core::mem::offset_of!(CqDense, rows) - 120usize];
    ["Offset of field: CqDense::operands"][::core::mem::offset_of!(CqDense, operands) - 136usize];
    ["Offset of field: CqDense::pairs"][::core::mem::offset_of!(CqDense, pairs) - 140usize];
    ["Offset of field: CqDense::gated"][::core::mem::offset_of!(CqDense, gated) - 144usize];
    ["Offset of field: CqDense::m"][::core::mem::offset_of!(CqDense, m) - 148usize];
    ["Offset of field: CqDense::k"][::core::mem::offset_of!(CqDense, k) - 152usize];
    ["Offset of field: CqDense::x_dtype"][::core::mem::offset_of!(CqDense, x_dtype) - 156usize];
    ["Offset of field: CqDense::weight_dtype"][::core::mem::offset_of!(CqDense, weight_dtype) - 160usize];
    ["Offset of field: CqDense::eps"][::core::mem::offset_of!(CqDense, eps) - 164usize];
    ["Offset of field: CqDense::finish"][::core::mem::offset_of!(CqDense, finish) - 168usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqEmbed {
    pub table: *const ::core::ffi::c_void,
    pub ids: *const u32,
    pub y: *mut ::core::ffi::c_void,
    pub first_row: u32,
    pub rows: u32,
    pub vocabulary: u32,
    pub k: u32,
    pub table_dtype: u32,
    pub y_dtype: u32,
    pub factor: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqEmbed"][::core::mem::size_of::<CqEmbed>() - 56usize];
    ["Alignment of CqEmbed"][::core::mem::align_of::<CqEmbed>() - 8usize];
    ["Offset of field: CqEmbed::table"][::core::mem::offset_of!(CqEmbed, table) - 0usize];
    ["Offset of field: CqEmbed::ids"][::core::mem::offset_of!(CqEmbed, ids) - 8usize];
    ["Offset of field: CqEmbed::y"][::core::mem::offset_of!(CqEmbed, y) - 16usize];
    ["Offset of field: CqEmbed::first_row"][::core::mem::offset_of!(CqEmbed, first_row) - 24usize];
    ["Offset of field: CqEmbed::rows"][::core::mem::offset_of!(CqEmbed, rows) - 28usize];
    ["Offset of field: CqEmbed::vocabulary"][::core::mem::offset_of!(CqEmbed, vocabulary) - 32usize];
    ["Offset of field: CqEmbed::k"][::core::mem::offset_of!(CqEmbed, k) - 36usize];
    ["Offset of field: CqEmbed::table_dtype"][::core::mem::offset_of!(CqEmbed, table_dtype) - 40usize];
    ["Offset of field: CqEmbed::y_dtype"][::core::mem::offset_of!(CqEmbed, y_dtype) - 44usize];
    ["Offset of field: CqEmbed::factor"][::core::mem::offset_of!(CqEmbed, factor) - 48usize];
    ["Offset of field: CqEmbed::unused"][::core::mem::offset_of!(CqEmbed, unused) - 52usize];
};
pub const CQ_NOT_GATED: CqGating = 0;
pub const CQ_SILU: CqGating = 1;
pub const CQ_CLAMPED: CqGating = 2;
pub type CqGating = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqTile {
    pub expert: u32,
    pub first: u32,
    pub count: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqTile"][::core::mem::size_of::<CqTile>() - 12usize];
    ["Alignment of CqTile"][::core::mem::align_of::<CqTile>() - 4usize];
    ["Offset of field: CqTile::expert"][::core::mem::offset_of!(CqTile, expert) - 0usize];
    ["Offset of field: CqTile::first"][::core::mem::offset_of!(CqTile, first) - 4usize];
    ["Offset of field: CqTile::count"][::core::mem::offset_of!(CqTile, count) - 8usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqExperts {
    pub operand: [CqOperand; 2usize],
    pub global_scale: [*const f32; 2usize],
    pub ids: *const u32,
    pub routing_weights: *const f32,
    pub residual: *const ::core::ffi::c_void,
    pub order: *const u32,
    pub tiles: *const CqTile,
    pub tile_count: *const u32,
    pub x: *const ::core::ffi::c_void,
    pub partial: *mut f32,
    pub arrivals: *mut u32,
    pub pairs_of_x: u32,
    pub experts: u32,
    pub top_k: u32,
    pub splits: u32,
    pub k: u32,
    pub k_per_split: u32,
    pub group_size: u32,
    pub x_dtype: u32,
    pub y_dtype: u32,
    pub gating: u32,
    pub alpha: f32,
    pub limit: f32,
    pub factor: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqExperts"][::core::mem::size_of::<CqExperts>() - 304usize];
    ["Alignment of CqExperts"][::core::mem::align_of::<CqExperts>() - 8usize];
    ["Offset of field: CqExperts::operand"][::core::mem::offset_of!(CqExperts, operand) - 0usize];
    ["Offset of field: CqExperts::global_scale"][::core::mem::offset_of!(CqExperts, global_scale) - 160usize];
    ["Offset of field: CqExperts::ids"][::core::mem::offset_of!(CqExperts, ids) - 176usize];
    ["Offset of field: CqExperts::routing_weights"]
        [::core::mem::offset_of!(CqExperts, routing_weights) - 184usize];
    ["Offset of field: CqExperts::residual"][::core::mem::offset_of!(CqExperts, residual) - 192usize];
    ["Offset of field: CqExperts::order"][::core::mem::offset_of!(CqExperts, order) - 200usize];
    ["Offset of field: CqExperts::tiles"][::core::mem::offset_of!(CqExperts, tiles) - 208usize];
    ["Offset of field: CqExperts::tile_count"][::core::mem::offset_of!(CqExperts, tile_count) - 216usize];
    ["Offset of field: CqExperts::x"][::core::mem::offset_of!(CqExperts, x) - 224usize];
    ["Offset of field: CqExperts::partial"][::core::mem::offset_of!(CqExperts, partial) - 232usize];
    ["Offset of field: CqExperts::arrivals"][::core::mem::offset_of!(CqExperts, arrivals) - 240usize];
    ["Offset of field: CqExperts::pairs_of_x"][::core::mem::offset_of!(CqExperts, pairs_of_x) - 248usize];
    ["Offset of field: CqExperts::experts"][::core::mem::offset_of!(CqExperts, experts) - 252usize];
    ["Offset of field: CqExperts::top_k"][::core::mem::offset_of!(CqExperts, top_k) - 256usize];
    ["Offset of field: CqExperts::splits"][::core::mem::offset_of!(CqExperts, splits) - 260usize];
    ["Offset of field: CqExperts::k"][::core::mem::offset_of!(CqExperts, k) - 264usize];
    ["Offset of field: CqExperts::k_per_split"][::core::mem::offset_of!(CqExperts, k_per_split) - 268usize];
    ["Offset of field: CqExperts::group_size"][::core::mem::offset_of!(CqExperts, group_size) - 272usize];
    ["Offset of field: CqExperts::x_dtype"][::core::mem::offset_of!(CqExperts, x_dtype) - 276usize];
    ["Offset of field: CqExperts::y_dtype"][::core::mem::offset_of!(CqExperts, y_dtype) - 280usize];
    ["Offset of field: CqExperts::gating"][::core::mem::offset_of!(CqExperts, gating) - 284usize];
    ["Offset of field: CqExperts::alpha"][::core::mem::offset_of!(CqExperts, alpha) - 288usize];
    ["Offset of field: CqExperts::limit"][::core::mem::offset_of!(CqExperts, limit) - 292usize];
    ["Offset of field: CqExperts::factor"][::core::mem::offset_of!(CqExperts, factor) - 296usize];
    ["Offset of field: CqExperts::unused"][::core::mem::offset_of!(CqExperts, unused) - 300usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqTilesX {
    pub x: *const ::core::ffi::c_void,
    pub norm: *const f32,
    pub halves: *mut ::core::ffi::c_void,
    pub units: *mut f32,
    pub sums: *mut f32,
    pub k: u32,
    pub k_padded: u32,
    pub x_stride: u32,
    pub x_dtype: u32,
    pub group: u32,
    pub order: u32,
    pub terms: u32,
    pub eps: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqTilesX"][::core::mem::size_of::<CqTilesX>() - 72usize];
    ["Alignment of CqTilesX"][::core::mem::align_of::<CqTilesX>() - 8usize];
    ["Offset of field: CqTilesX::x"][::core::mem::offset_of!(CqTilesX, x) - 0usize];
    ["Offset of field: CqTilesX::norm"][::core::mem::offset_of!(CqTilesX, norm) - 8usize];
    ["Offset of field: CqTilesX::halves"][::core::mem::offset_of!(CqTilesX, halves) - 16usize];
    ["Offset of field: CqTilesX::units"][::core::mem::offset_of!(CqTilesX, units) - 24usize];
    ["Offset of field: CqTilesX::sums"][::core::mem::offset_of!(CqTilesX, sums) - 32usize];
    ["Offset of field: CqTilesX::k"][::core::mem::offset_of!(CqTilesX, k) - 40usize];
    ["Offset of field: CqTilesX::k_padded"][::core::mem::offset_of!(CqTilesX, k_padded) - 44usize];
    ["Offset of field: CqTilesX::x_stride"][::core::mem::offset_of!(CqTilesX, x_stride) - 48usize];
    ["Offset of field: CqTilesX::x_dtype"][::core::mem::offset_of!(CqTilesX, x_dtype) - 52usize];
    ["Offset of field: CqTilesX::group"][::core::mem::offset_of!(CqTilesX, group) - 56usize];
    ["Offset of field: CqTilesX::order"][::core::mem::offset_of!(CqTilesX, order) - 60usize];
    ["Offset of field: CqTilesX::terms"][::core::mem::offset_of!(CqTilesX, terms) - 64usize];
    ["Offset of field: CqTilesX::eps"][::core::mem::offset_of!(CqTilesX, eps) - 68usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqTiles {
    pub operand: [CqOperand; 2usize],
    pub halves: *const ::core::ffi::c_void,
    pub units: *const f32,
    pub sums: *const f32,
    pub global_scale: [*const f32; 2usize],
    pub order: *const u32,
    pub tiles: *const CqTile,
    pub tile_count: *const u32,
    pub residual: *const ::core::ffi::c_void,
    pub partial: *mut f32,
    pub arrivals: *mut u32,
    pub m: u32,
    pub terms: u32,
    pub k: u32,
    pub k_padded: u32,
    pub words_of_row: u32,
    pub log_group_size: u32,
    pub columns: u32,
    pub stages: u32,
    pub whole_copies: u32,
    pub pairs_of_x: u32,
    pub experts: u32,
    pub gating: u32,
    pub y_dtype: u32,
    pub alpha: f32,
    pub limit: f32,
    pub finish: CqFinish,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqTiles"][::core::mem::size_of::<CqTiles>() - 328usize];
    ["Alignment of CqTiles"][::core::mem::align_of::<CqTiles>() - 8usize];
    ["Offset of field: CqTiles::operand"][::core::mem::offset_of!(CqTiles, operand) - 0usize];
    ["Offset of field: CqTiles::halves"][::core::mem::offset_of!(CqTiles, halves) - 160usize];
    ["Offset of field: CqTiles::units"][::core::mem::offset_of!(CqTiles, units) - 168usize];
    ["Offset of field: CqTiles::sums"][::core::mem::offset_of!(CqTiles, sums) - 176usize];
    ["Offset of field: CqTiles::global_scale"][::core::mem::offset_of!(CqTiles, global_scale) - 184usize];
    ["Offset of field: CqTiles::order"][::core::mem::offset_of!(CqTiles, order) - 200usize];
    ["Offset of field: CqTiles::tiles"][::core::mem::offset_of!(CqTiles, tiles) - 208usize];
    ["Offset of field: CqTiles::tile_count"][::core::mem::offset_of!(CqTiles, tile_count) - 216usize];
    ["Offset of field: CqTiles::residual"][::core::mem::offset_of!(CqTiles, residual) - 224usize];
    ["Offset of field: CqTiles::partial"][::core::mem::offset_of!(CqTiles, partial) - 232usize];
    ["Offset of field: CqTiles::arrivals"][::core::mem::offset_of!(CqTiles, arrivals) - 240usize];
    ["Offset of field: CqTiles::m"][::core::mem::offset_of!(CqTiles, m) - 248usize];
    ["Offset of field: CqTiles::terms"][::core::mem::offset_of!(CqTiles, terms) - 252usize];
    ["Offset of field: CqTiles::k"][::core::mem::offset_of!(CqTiles, k) - 256usize];
    ["Offset of field: CqTiles::k_padded"][::core::mem::offset_of!(CqTiles, k_padded) - 260usize];
    ["Offset of field: CqTiles::words_of_row"][::core::mem::offset_of!(CqTiles, words_of_row) - 264usize];
    ["Offset of field: CqTiles::log_group_size"][::core::mem::offset_of!(CqTiles, log_group_size) - 268usize];
    ["Offset of field: CqTiles::columns"][::core::mem::offset_of!(CqTiles, columns) - 272usize];
    ["Offset of field: CqTiles::stages"][::core::mem::offset_of!(CqTiles, stages) - 276usize];
    ["Offset of field: CqTiles::whole_copies"][::core::mem::offset_of!(CqTiles, whole_copies) - 280usize];
    ["Offset of field: CqTiles::pairs_of_x"][::core::mem::offset_of!(CqTiles, pairs_of_x) - 284usize];
    ["Offset of field: CqTiles::experts"][::core::mem::offset_of!(CqTiles, experts) - 288usize];
    ["Offset of field: CqTiles::gating"][::core::mem::offset_of!(CqTiles, gating) - 292usize];
    ["Offset of field: CqTiles::y_dtype"][::core::mem::offset_of!(CqTiles, y_dtype) - 296usize];
    ["Offset of field: CqTiles::alpha"][::core::mem::offset_of!(CqTiles, alpha) - 300usize];
    ["Offset of field: CqTiles::limit"][::core::mem::offset_of!(CqTiles, limit) - 304usize];
    ["Offset of field: CqTiles::finish"][::core::mem::offset_of!(CqTiles, finish) - 308usize];
    ["Offset of field: CqTiles::unused"][::core::mem::offset_of!(CqTiles, unused) - 324usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqSortPairs {
    pub ids: *const u32,
    pub order: *mut u32,
    pub tiles: *mut CqTile,
    pub tile_count: *mut u32,
    pub pairs: u32,
    pub experts: u32,
    pub rows_of_tile: u32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqSortPairs"][::core::mem::size_of::<CqSortPairs>() - 48usize];
    ["Alignment of CqSortPairs"][::core::mem::align_of::<CqSortPairs>() - 8usize];
    ["Offset of field: CqSortPairs::ids"][::core::mem::offset_of!(CqSortPairs, ids) - 0usize];
    ["Offset of field: CqSortPairs::order"][::core::mem::offset_of!(CqSortPairs, order) - 8usize];
    ["Offset of field: CqSortPairs::tiles"][::core::mem::offset_of!(CqSortPairs, tiles) - 16usize];
    ["Offset of field: CqSortPairs::tile_count"][::core::mem::offset_of!(CqSortPairs, tile_count) - 24usize];
    ["Offset of field: CqSortPairs::pairs"][::core::mem::offset_of!(CqSortPairs, pairs) - 32usize];
    ["Offset of field: CqSortPairs::experts"][::core::mem::offset_of!(CqSortPairs, experts) - 36usize];
    ["Offset of field: CqSortPairs::rows_of_tile"]
        [::core::mem::offset_of!(CqSortPairs, rows_of_tile) - 40usize];
    ["Offset of field: CqSortPairs::unused"][::core::mem::offset_of!(CqSortPairs, unused) - 44usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqWeightedSum {
    pub z: *const f32,
    pub routing_weights: *const f32,
    pub residual: *const ::core::ffi::c_void,
    pub y: *mut ::core::ffi::c_void,
    pub top_k: u32,
    pub rows: u32,
    pub y_dtype: u32,
    pub factor: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqWeightedSum"][::core::mem::size_of::<CqWeightedSum>() - 48usize];
    ["Alignment of CqWeightedSum"][::core::mem::align_of::<CqWeightedSum>() - 8usize];
    ["Offset of field: CqWeightedSum::z"][::core::mem::offset_of!(CqWeightedSum, z) - 0usize];
    ["Offset of field: CqWeightedSum::routing_weights"]
        [::core::mem::offset_of!(CqWeightedSum, routing_weights) - 8usize];
    ["Offset of field: CqWeightedSum::residual"][::core::mem::offset_of!(CqWeightedSum, residual) - 16usize];
    ["Offset of field: CqWeightedSum::y"][::core::mem::offset_of!(CqWeightedSum, y) - 24usize];
    ["Offset of field: CqWeightedSum::top_k"][::core::mem::offset_of!(CqWeightedSum, top_k) - 32usize];
    ["Offset of field: CqWeightedSum::rows"][::core::mem::offset_of!(CqWeightedSum, rows) - 36usize];
    ["Offset of field: CqWeightedSum::y_dtype"][::core::mem::offset_of!(CqWeightedSum, y_dtype) - 40usize];
    ["Offset of field: CqWeightedSum::factor"][::core::mem::offset_of!(CqWeightedSum, factor) - 44usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqRoute {
    pub x: *const ::core::ffi::c_void,
    pub norm: *const f32,
    pub normed: *mut ::core::ffi::c_void,
    pub weight: *const ::core::ffi::c_void,
    pub bias: *const f32,
    pub correction: *const f32,
    pub shared_gate: *const ::core::ffi::c_void,
    pub shared: *mut ::core::ffi::c_void,
    pub logits: *mut f32,
    pub arrivals: *mut u32,
    pub ids: *mut u32,
    pub shares: *mut f32,
    pub hidden: u32,
    pub experts: u32,
    pub top_k: u32,
    pub groups: u32,
    pub chosen_groups: u32,
    pub summed: u32,
    pub sigmoid: u32,
    pub normalize: u32,
    pub scale: f32,
    pub eps: f32,
    pub dtype: u32,
    pub weight_dtype: u32,
    pub shared_width: u32,
    pub shared_gate_dtype: u32,
    pub shared_bias: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqRoute"][::core::mem::size_of::<CqRoute>() - 160usize];
    ["Alignment of CqRoute"][::core::mem::align_of::<CqRoute>() - 8usize];
    ["Offset of field: CqRoute::x"][::core::mem::offset_of!(CqRoute, x) - 0usize];
    ["Offset of field: CqRoute::norm"][::core::mem::offset_of!(CqRoute, norm) - 8usize];
    ["Offset of field: CqRoute::normed"][::core::mem::offset_of!(CqRoute, normed) - 16usize];
    ["Offset of field: CqRoute::weight"][::core::mem::offset_of!(CqRoute, weight) - 24usize];
    ["Offset of field: CqRoute::bias"][::core::mem::offset_of!(CqRoute, bias) - 32usize];
    ["Offset of field: CqRoute::correction"][::core::mem::offset_of!(CqRoute, correction) - 40usize];
    ["Offset of field: CqRoute::shared_gate"][::core::mem::offset_of!(CqRoute, shared_gate) - 48usize];
    ["Offset of field: CqRoute::shared"][::core::mem::offset_of!(CqRoute, shared) - 56usize];
    ["Offset of field: CqRoute::logits"][::core::mem::offset_of!(CqRoute, logits) - 64usize];
    ["Offset of field: CqRoute::arrivals"][::core::mem::offset_of!(CqRoute, arrivals) - 72usize];
    ["Offset of field: CqRoute::ids"][::core::mem::offset_of!(CqRoute, ids) - 80usize];
    ["Offset of field: CqRoute::shares"][::core::mem::offset_of!(CqRoute, shares) - 88usize];
    ["Offset of field: CqRoute::hidden"][::core::mem::offset_of!(CqRoute, hidden) - 96usize];
    ["Offset of field: CqRoute::experts"][::core::mem::offset_of!(CqRoute, experts) - 100usize];
    ["Offset of field: CqRoute::top_k"][::core::mem::offset_of!(CqRoute, top_k) - 104usize];
    ["Offset of field: CqRoute::groups"][::core::mem::offset_of!(CqRoute, groups) - 108usize];
    ["Offset of field: CqRoute::chosen_groups"][::core::mem::offset_of!(CqRoute, chosen_groups) - 112usize];
    ["Offset of field: CqRoute::summed"][::core::mem::offset_of!(CqRoute, summed) - 116usize];
    ["Offset of field: CqRoute::sigmoid"][::core::mem::offset_of!(CqRoute, sigmoid) - 120usize];
    ["Offset of field: CqRoute::normalize"][::core::mem::offset_of!(CqRoute, normalize) - 124usize];
    ["Offset of field: CqRoute::scale"][::core::mem::offset_of!(CqRoute, scale) - 128usize];
    ["Offset of field: CqRoute::eps"][::core::mem::offset_of!(CqRoute, eps) - 132usize];
    ["Offset of field: CqRoute::dtype"][::core::mem::offset_of!(CqRoute, dtype) - 136usize];
    ["Offset of field: CqRoute::weight_dtype"][::core::mem::offset_of!(CqRoute, weight_dtype) - 140usize];
    ["Offset of field: CqRoute::shared_width"][::core::mem::offset_of!(CqRoute, shared_width) - 144usize];
    ["Offset of field: CqRoute::shared_gate_dtype"]
        [::core::mem::offset_of!(CqRoute, shared_gate_dtype) - 148usize];
    ["Offset of field: CqRoute::shared_bias"][::core::mem::offset_of!(CqRoute, shared_bias) - 152usize];
    ["Offset of field: CqRoute::unused"][::core::mem::offset_of!(CqRoute, unused) - 156usize];
};
pub const CQ_HEADS_AS_THEY_ARE: CqHeadNormKind = 0;
pub const CQ_HEADS_RMS: CqHeadNormKind = 1;
pub const CQ_HEADS_LAYER: CqHeadNormKind = 2;
pub type CqHeadNormKind = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqHeadNorm {
    pub weight: *const f32,
    pub bias: *const f32,
    pub stride: u32,
    pub kind: u32,
    pub eps: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqHeadNorm"][::core::mem::size_of::<CqHeadNorm>() - 32usize];
    ["Alignment of CqHeadNorm"][::core::mem::align_of::<CqHeadNorm>() - 8usize];
    ["Offset of field: CqHeadNorm::weight"][::core::mem::offset_of!(CqHeadNorm, weight) - 0usize];
    ["Offset of field: CqHeadNorm::bias"][::core::mem::offset_of!(CqHeadNorm, bias) - 8usize];
    ["Offset of field: CqHeadNorm::stride"][::core::mem::offset_of!(CqHeadNorm, stride) - 16usize];
    ["Offset of field: CqHeadNorm::kind"][::core::mem::offset_of!(CqHeadNorm, kind) - 20usize];
    ["Offset of field: CqHeadNorm::eps"][::core::mem::offset_of!(CqHeadNorm, eps) - 24usize];
    ["Offset of field: CqHeadNorm::unused"][::core::mem::offset_of!(CqHeadNorm, unused) - 28usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqAttend {
    pub q: *const ::core::ffi::c_void,
    pub k: *const ::core::ffi::c_void,
    pub v: *const ::core::ffi::c_void,
    pub keys: *mut ::core::ffi::c_void,
    pub values: *mut ::core::ffi::c_void,
    pub key_groups: *mut ::core::ffi::c_void,
    pub value_groups: *mut ::core::ffi::c_void,
    pub sinks: *const f32,
    pub y: *mut ::core::ffi::c_void,
    pub partial: *mut f32,
    pub arrivals: *mut u32,
    pub positions: *const u32,
    pub turns: *const f32,
    pub growth: *const f32,
    pub q_norm: CqHeadNorm,
    pub k_norm: CqHeadNorm,
    pub group: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub capacity: u32,
    pub position: u32,
    pub settled: u32,
    pub window: u32,
    pub chunked: u32,
    pub splits: u32,
    pub stages: u32,
    pub turn_rows: u32,
    pub pairs: u32,
    pub interleaved: u32,
    pub turns_first: u32,
    pub scale: f32,
    pub cap: f32,
    pub dtype: u32,
    pub ring: u32,
    pub gated: u32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqAttend"][::core::mem::size_of::<CqAttend>() - 256usize];
    ["Alignment of CqAttend"][::core::mem::align_of::<CqAttend>() - 8usize];
    ["Offset of field: CqAttend::q"][::core::mem::offset_of!(CqAttend, q) - 0usize];
    ["Offset of field: CqAttend::k"][::core::mem::offset_of!(CqAttend, k) - 8usize];
    ["Offset of field: CqAttend::v"][::core::mem::offset_of!(CqAttend, v) - 16usize];
    ["Offset of field: CqAttend::keys"][::core::mem::offset_of!(CqAttend, keys) - 24usize];
    ["Offset of field: CqAttend::values"][::core::mem::offset_of!(CqAttend, values) - 32usize];
    ["Offset of field: CqAttend::key_groups"][::core::mem::offset_of!(CqAttend, key_groups) - 40usize];
    ["Offset of field: CqAttend::value_groups"][::core::mem::offset_of!(CqAttend, value_groups) - 48usize];
    ["Offset of field: CqAttend::sinks"][::core::mem::offset_of!(CqAttend, sinks) - 56usize];
    ["Offset of field: CqAttend::y"][::core::mem::offset_of!(CqAttend, y) - 64usize];
    ["Offset of field: CqAttend::partial"][::core::mem::offset_of!(CqAttend, partial) - 72usize];
    ["Offset of field: CqAttend::arrivals"][::core::mem::offset_of!(CqAttend, arrivals) - 80usize];
    ["Offset of field: CqAttend::positions"][::core::mem::offset_of!(CqAttend, positions) - 88usize];
    ["Offset of field: CqAttend::turns"][::core::mem::offset_of!(CqAttend, turns) - 96usize];
    ["Offset of field: CqAttend::growth"][::core::mem::offset_of!(CqAttend, growth) - 104usize];
    ["Offset of field: CqAttend::q_norm"][::core::mem::offset_of!(CqAttend, q_norm) - 112usize];
    ["Offset of field: CqAttend::k_norm"][::core::mem::offset_of!(CqAttend, k_norm) - 144usize];
    ["Offset of field: CqAttend::group"][::core::mem::offset_of!(CqAttend, group) - 176usize];
    ["Offset of field: CqAttend::kv_heads"][::core::mem::offset_of!(CqAttend, kv_heads) - 180usize];
    ["Offset of field: CqAttend::head_dim"][::core::mem::offset_of!(CqAttend, head_dim) - 184usize];
    ["Offset of field: CqAttend::capacity"][::core::mem::offset_of!(CqAttend, capacity) - 188usize];
    ["Offset of field: CqAttend::position"][::core::mem::offset_of!(CqAttend, position) - 192usize];
    ["Offset of field: CqAttend::settled"][::core::mem::offset_of!(CqAttend, settled) - 196usize];
    ["Offset of field: CqAttend::window"][::core::mem::offset_of!(CqAttend, window) - 200usize];
    ["Offset of field: CqAttend::chunked"][::core::mem::offset_of!(CqAttend, chunked) - 204usize];
    ["Offset of field: CqAttend::splits"][::core::mem::offset_of!(CqAttend, splits) - 208usize];
    ["Offset of field: CqAttend::stages"][::core::mem::offset_of!(CqAttend, stages) - 212usize];
    ["Offset of field: CqAttend::turn_rows"][::core::mem::offset_of!(CqAttend, turn_rows) - 216usize];
    ["Offset of field: CqAttend::pairs"][::core::mem::offset_of!(CqAttend, pairs) - 220usize];
    ["Offset of field: CqAttend::interleaved"][::core::mem::offset_of!(CqAttend, interleaved) - 224usize];
    ["Offset of field: CqAttend::turns_first"][::core::mem::offset_of!(CqAttend, turns_first) - 228usize];
    ["Offset of field: CqAttend::scale"][::core::mem::offset_of!(CqAttend, scale) - 232usize];
    ["Offset of field: CqAttend::cap"][::core::mem::offset_of!(CqAttend, cap) - 236usize];
    ["Offset of field: CqAttend::dtype"][::core::mem::offset_of!(CqAttend, dtype) - 240usize];
    ["Offset of field: CqAttend::ring"][::core::mem::offset_of!(CqAttend, ring) - 244usize];
    ["Offset of field: CqAttend::gated"][::core::mem::offset_of!(CqAttend, gated) - 248usize];
    ["Offset of field: CqAttend::unused"][::core::mem::offset_of!(CqAttend, unused) - 252usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqLane {
    pub x: *const ::core::ffi::c_void,
    pub of_token: u32,
    pub of_head: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqLane"][::core::mem::size_of::<CqLane>() - 16usize];
    ["Alignment of CqLane"][::core::mem::align_of::<CqLane>() - 8usize];
    ["Offset of field: CqLane::x"][::core::mem::offset_of!(CqLane, x) - 0usize];
    ["Offset of field: CqLane::of_token"][::core::mem::offset_of!(CqLane, of_token) - 8usize];
    ["Offset of field: CqLane::of_head"][::core::mem::offset_of!(CqLane, of_head) - 12usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqDeltaNet {
    pub q: CqLane,
    pub k: CqLane,
    pub v: CqLane,
    pub gate: CqLane,
    pub decay: CqLane,
    pub beta: CqLane,
    pub convolution: *const f32,
    pub rates: *const f32,
    pub gate_bias: *const f32,
    pub norm: *const f32,
    pub state: *mut f32,
    pub y: *mut ::core::ffi::c_void,
    pub positions: *const u32,
    pub position: u32,
    pub tokens: u32,
    pub value_heads: u32,
    pub shared: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub kernel: u32,
    pub groups: u32,
    pub tiled: u32,
    pub dtype: u32,
    pub eps: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqDeltaNet"][::core::mem::size_of::<CqDeltaNet>() - 200usize];
    ["Alignment of CqDeltaNet"][::core::mem::align_of::<CqDeltaNet>() - 8usize];
    ["Offset of field: CqDeltaNet::q"][::core::mem::offset_of!(CqDeltaNet, q) - 0usize];
    ["Offset of field: CqDeltaNet::k"][::core::mem::offset_of!(CqDeltaNet, k) - 16usize];
    ["Offset of field: CqDeltaNet::v"][::core::mem::offset_of!(CqDeltaNet, v) - 32usize];
    ["Offset of field: CqDeltaNet::gate"][::core::mem::offset_of!(CqDeltaNet, gate) - 48usize];
    ["Offset of field: CqDeltaNet::decay"][::core::mem::offset_of!(CqDeltaNet, decay) - 64usize];
    ["Offset of field: CqDeltaNet::beta"][::core::mem::offset_of!(CqDeltaNet, beta) - 80usize];
    ["Offset of field: CqDeltaNet::convolution"][::core::mem::offset_of!(CqDeltaNet, convolution) - 96usize];
    ["Offset of field: CqDeltaNet::rates"][::core::mem::offset_of!(CqDeltaNet, rates) - 104usize];
    ["Offset of field: CqDeltaNet::gate_bias"][::core::mem::offset_of!(CqDeltaNet, gate_bias) - 112usize];
    ["Offset of field: CqDeltaNet::norm"][::core::mem::offset_of!(CqDeltaNet, norm) - 120usize];
    ["Offset of field: CqDeltaNet::state"][::core::mem::offset_of!(CqDeltaNet, state) - 128usize];
    ["Offset of field: CqDeltaNet::y"][::core::mem::offset_of!(CqDeltaNet, y) - 136usize];
    ["Offset of field: CqDeltaNet::positions"][::core::mem::offset_of!(CqDeltaNet, positions) - 144usize];
    ["Offset of field: CqDeltaNet::position"][::core::mem::offset_of!(CqDeltaNet, position) - 152usize];
    ["Offset of field: CqDeltaNet::tokens"][::core::mem::offset_of!(CqDeltaNet, tokens) - 156usize];
    ["Offset of field: CqDeltaNet::value_heads"][::core::mem::offset_of!(CqDeltaNet, value_heads) - 160usize];
    ["Offset of field: CqDeltaNet::shared"][::core::mem::offset_of!(CqDeltaNet, shared) - 164usize];
    ["Offset of field: CqDeltaNet::key_dim"][::core::mem::offset_of!(CqDeltaNet, key_dim) - 168usize];
    ["Offset of field: CqDeltaNet::value_dim"][::core::mem::offset_of!(CqDeltaNet, value_dim) - 172usize];
    ["Offset of field: CqDeltaNet::kernel"][::core::mem::offset_of!(CqDeltaNet, kernel) - 176usize];
    ["Offset of field: CqDeltaNet::groups"][::core::mem::offset_of!(CqDeltaNet, groups) - 180usize];
    ["Offset of field: CqDeltaNet::tiled"][::core::mem::offset_of!(CqDeltaNet, tiled) - 184usize];
    ["Offset of field: CqDeltaNet::dtype"][::core::mem::offset_of!(CqDeltaNet, dtype) - 188usize];
    ["Offset of field: CqDeltaNet::eps"][::core::mem::offset_of!(CqDeltaNet, eps) - 192usize];
    ["Offset of field: CqDeltaNet::unused"][::core::mem::offset_of!(CqDeltaNet, unused) - 196usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqAttendPrompt {
    pub q: *const ::core::ffi::c_void,
    pub keys: *const ::core::ffi::c_void,
    pub values: *const ::core::ffi::c_void,
    pub key_groups: *const ::core::ffi::c_void,
    pub value_groups: *const ::core::ffi::c_void,
    pub sinks: *const f32,
    pub y: *mut ::core::ffi::c_void,
    pub places: *const u32,
    pub tokens: u32,
    pub position: u32,
    pub group: u32,
    pub kv_heads: u32,
    pub capacity: u32,
    pub window: u32,
    pub chunked: u32,
    pub dtype: u32,
    pub key_bits: u32,
    pub value_bits: u32,
    pub stages: u32,
    pub unused: u32,
    pub scale: f32,
    pub cap: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqAttendPrompt"][::core::mem::size_of::<CqAttendPrompt>() - 120usize];
    ["Alignment of CqAttendPrompt"][::core::mem::align_of::<CqAttendPrompt>() - 8usize];
    ["Offset of field: CqAttendPrompt::q"][::core::mem::offset_of!(CqAttendPrompt, q) - 0usize];
    ["Offset of field: CqAttendPrompt::keys"][::core::mem::offset_of!(CqAttendPrompt, keys) - 8usize];
    ["Offset of field: CqAttendPrompt::values"][::core::mem::offset_of!(CqAttendPrompt, values) - 16usize];
    ["Offset of field: CqAttendPrompt::key_groups"]
        [::core::mem::offset_of!(CqAttendPrompt, key_groups) - 24usize];
    ["Offset of field: CqAttendPrompt::value_groups"]
        [::core::mem::offset_of!(CqAttendPrompt, value_groups) - 32usize];
    ["Offset of field: CqAttendPrompt::sinks"][::core::mem::offset_of!(CqAttendPrompt, sinks) - 40usize];
    ["Offset of field: CqAttendPrompt::y"][::core::mem::offset_of!(CqAttendPrompt, y) - 48usize];
    ["Offset of field: CqAttendPrompt::places"][::core::mem::offset_of!(CqAttendPrompt, places) - 56usize];
    ["Offset of field: CqAttendPrompt::tokens"][::core::mem::offset_of!(CqAttendPrompt, tokens) - 64usize];
    ["Offset of field: CqAttendPrompt::position"]
        [::core::mem::offset_of!(CqAttendPrompt, position) - 68usize];
    ["Offset of field: CqAttendPrompt::group"][::core::mem::offset_of!(CqAttendPrompt, group) - 72usize];
    ["Offset of field: CqAttendPrompt::kv_heads"]
        [::core::mem::offset_of!(CqAttendPrompt, kv_heads) - 76usize];
    ["Offset of field: CqAttendPrompt::capacity"]
        [::core::mem::offset_of!(CqAttendPrompt, capacity) - 80usize];
    ["Offset of field: CqAttendPrompt::window"][::core::mem::offset_of!(CqAttendPrompt, window) - 84usize];
    ["Offset of field: CqAttendPrompt::chunked"][::core::mem::offset_of!(CqAttendPrompt, chunked) - 88usize];
    ["Offset of field: CqAttendPrompt::dtype"][::core::mem::offset_of!(CqAttendPrompt, dtype) - 92usize];
    ["Offset of field: CqAttendPrompt::key_bits"]
        [::core::mem::offset_of!(CqAttendPrompt, key_bits) - 96usize];
    ["Offset of field: CqAttendPrompt::value_bits"]
        [::core::mem::offset_of!(CqAttendPrompt, value_bits) - 100usize];
    ["Offset of field: CqAttendPrompt::stages"][::core::mem::offset_of!(CqAttendPrompt, stages) - 104usize];
    ["Offset of field: CqAttendPrompt::unused"][::core::mem::offset_of!(CqAttendPrompt, unused) - 108usize];
    ["Offset of field: CqAttendPrompt::scale"][::core::mem::offset_of!(CqAttendPrompt, scale) - 112usize];
    ["Offset of field: CqAttendPrompt::cap"][::core::mem::offset_of!(CqAttendPrompt, cap) - 116usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqAppend {
    pub k: *const ::core::ffi::c_void,
    pub v: *const ::core::ffi::c_void,
    pub keys: *mut ::core::ffi::c_void,
    pub values: *mut ::core::ffi::c_void,
    pub key_groups: *mut ::core::ffi::c_void,
    pub value_groups: *mut ::core::ffi::c_void,
    pub places: *const u32,
    pub tokens: u32,
    pub position: u32,
    pub kv_heads: u32,
    pub capacity: u32,
    pub key_bits: u32,
    pub value_bits: u32,
    pub dtype: u32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqAppend"][::core::mem::size_of::<CqAppend>() - 88usize];
    ["Alignment of CqAppend"][::core::mem::align_of::<CqAppend>() - 8usize];
    ["Offset of field: CqAppend::k"][::core::mem::offset_of!(CqAppend, k) - 0usize];
    ["Offset of field: CqAppend::v"][::core::mem::offset_of!(CqAppend, v) - 8usize];
    ["Offset of field: CqAppend::keys"][::core::mem::offset_of!(CqAppend, keys) - 16usize];
    ["Offset of field: CqAppend::values"][::core::mem::offset_of!(CqAppend, values) - 24usize];
    ["Offset of field: CqAppend::key_groups"][::core::mem::offset_of!(CqAppend, key_groups) - 32usize];
    ["Offset of field: CqAppend::value_groups"][::core::mem::offset_of!(CqAppend, value_groups) - 40usize];
    ["Offset of field: CqAppend::places"][::core::mem::offset_of!(CqAppend, places) - 48usize];
    ["Offset of field: CqAppend::tokens"][::core::mem::offset_of!(CqAppend, tokens) - 56usize];
    ["Offset of field: CqAppend::position"][::core::mem::offset_of!(CqAppend, position) - 60usize];
    ["Offset of field: CqAppend::kv_heads"][::core::mem::offset_of!(CqAppend, kv_heads) - 64usize];
    ["Offset of field: CqAppend::capacity"][::core::mem::offset_of!(CqAppend, capacity) - 68usize];
    ["Offset of field: CqAppend::key_bits"][::core::mem::offset_of!(CqAppend, key_bits) - 72usize];
    ["Offset of field: CqAppend::value_bits"][::core::mem::offset_of!(CqAppend, value_bits) - 76usize];
    ["Offset of field: CqAppend::dtype"][::core::mem::offset_of!(CqAppend, dtype) - 80usize];
    ["Offset of field: CqAppend::unused"][::core::mem::offset_of!(CqAppend, unused) - 84usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqDequantize {
    pub matrix: CqMatrix,
    pub ids: *const ::core::ffi::c_void,
    pub y: *mut ::core::ffi::c_void,
    pub first_row: u64,
    pub vocabulary: u64,
    pub count: u32,
    pub k: u32,
    pub group_size: u32,
    pub ids_bytes: u32,
    pub y_dtype: u32,
    pub factor: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqDequantize"][::core::mem::size_of::<CqDequantize>() - 112usize];
    ["Alignment of CqDequantize"][::core::mem::align_of::<CqDequantize>() - 8usize];
    ["Offset of field: CqDequantize::matrix"][::core::mem::offset_of!(CqDequantize, matrix) - 0usize];
    ["Offset of field: CqDequantize::ids"][::core::mem::offset_of!(CqDequantize, ids) - 56usize];
    ["Offset of field: CqDequantize::y"][::core::mem::offset_of!(CqDequantize, y) - 64usize];
    ["Offset of field: CqDequantize::first_row"][::core::mem::offset_of!(CqDequantize, first_row) - 72usize];
    ["Offset of field: CqDequantize::vocabulary"]
        [::core::mem::offset_of!(CqDequantize, vocabulary) - 80usize];
    ["Offset of field: CqDequantize::count"][::core::mem::offset_of!(CqDequantize, count) - 88usize];
    ["Offset of field: CqDequantize::k"][::core::mem::offset_of!(CqDequantize, k) - 92usize];
    ["Offset of field: CqDequantize::group_size"]
        [::core::mem::offset_of!(CqDequantize, group_size) - 96usize];
    ["Offset of field: CqDequantize::ids_bytes"][::core::mem::offset_of!(CqDequantize, ids_bytes) - 100usize];
    ["Offset of field: CqDequantize::y_dtype"][::core::mem::offset_of!(CqDequantize, y_dtype) - 104usize];
    ["Offset of field: CqDequantize::factor"][::core::mem::offset_of!(CqDequantize, factor) - 108usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqNorm {
    pub x: *const ::core::ffi::c_void,
    pub weight: *const f32,
    pub bias: *const f32,
    pub residual: *const ::core::ffi::c_void,
    pub y: *mut ::core::ffi::c_void,
    pub columns: *const u32,
    pub width: u32,
    pub y_width: u32,
    pub normalizes: u32,
    pub subtracts_mean: u32,
    pub eps: f32,
    pub factor: f32,
    pub dtype: u32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqNorm"][::core::mem::size_of::<CqNorm>() - 80usize];
    ["Alignment of CqNorm"][::core::mem::align_of::<CqNorm>() - 8usize];
    ["Offset of field: CqNorm::x"][::core::mem::offset_of!(CqNorm, x) - 0usize];
    ["Offset of field: CqNorm::weight"][::core::mem::offset_of!(CqNorm, weight) - 8usize];
    ["Offset of field: CqNorm::bias"][::core::mem::offset_of!(CqNorm, bias) - 16usize];
    ["Offset of field: CqNorm::residual"][::core::mem::offset_of!(CqNorm, residual) - 24usize];
    ["Offset of field: CqNorm::y"][::core::mem::offset_of!(CqNorm, y) - 32usize];
    ["Offset of field: CqNorm::columns"][::core::mem::offset_of!(CqNorm, columns) - 40usize];
    ["Offset of field: CqNorm::width"][::core::mem::offset_of!(CqNorm, width) - 48usize];
    ["Offset of field: CqNorm::y_width"][::core::mem::offset_of!(CqNorm, y_width) - 52usize];
    ["Offset of field: CqNorm::normalizes"][::core::mem::offset_of!(CqNorm, normalizes) - 56usize];
    ["Offset of field: CqNorm::subtracts_mean"][::core::mem::offset_of!(CqNorm, subtracts_mean) - 60usize];
    ["Offset of field: CqNorm::eps"][::core::mem::offset_of!(CqNorm, eps) - 64usize];
    ["Offset of field: CqNorm::factor"][::core::mem::offset_of!(CqNorm, factor) - 68usize];
    ["Offset of field: CqNorm::dtype"][::core::mem::offset_of!(CqNorm, dtype) - 72usize];
    ["Offset of field: CqNorm::unused"][::core::mem::offset_of!(CqNorm, unused) - 76usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqElementwise {
    pub x: *const ::core::ffi::c_void,
    pub up: *const ::core::ffi::c_void,
    pub residual: *const ::core::ffi::c_void,
    pub y: *mut ::core::ffi::c_void,
    pub finish: CqFinish,
    pub count: u32,
    pub dtype: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqElementwise"][::core::mem::size_of::<CqElementwise>() - 56usize];
    ["Alignment of CqElementwise"][::core::mem::align_of::<CqElementwise>() - 8usize];
    ["Offset of field: CqElementwise::x"][::core::mem::offset_of!(CqElementwise, x) - 0usize];
    ["Offset of field: CqElementwise::up"][::core::mem::offset_of!(CqElementwise, up) - 8usize];
    ["Offset of field: CqElementwise::residual"][::core::mem::offset_of!(CqElementwise, residual) - 16usize];
    ["Offset of field: CqElementwise::y"][::core::mem::offset_of!(CqElementwise, y) - 24usize];
    ["Offset of field: CqElementwise::finish"][::core::mem::offset_of!(CqElementwise, finish) - 32usize];
    ["Offset of field: CqElementwise::count"][::core::mem::offset_of!(CqElementwise, count) - 48usize];
    ["Offset of field: CqElementwise::dtype"][::core::mem::offset_of!(CqElementwise, dtype) - 52usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqQuantize {
    pub weights: *const ::core::ffi::c_void,
    pub packed: *mut u32,
    pub scales: *mut ::core::ffi::c_void,
    pub biases: *mut ::core::ffi::c_void,
    pub absmax: f32,
    pub unused: u32,
    pub groups: u64,
    pub group_size: u32,
    pub dtype: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqQuantize"][::core::mem::size_of::<CqQuantize>() - 56usize];
    ["Alignment of CqQuantize"][::core::mem::align_of::<CqQuantize>() - 8usize];
    ["Offset of field: CqQuantize::weights"][::core::mem::offset_of!(CqQuantize, weights) - 0usize];
    ["Offset of field: CqQuantize::packed"][::core::mem::offset_of!(CqQuantize, packed) - 8usize];
    ["Offset of field: CqQuantize::scales"][::core::mem::offset_of!(CqQuantize, scales) - 16usize];
    ["Offset of field: CqQuantize::biases"][::core::mem::offset_of!(CqQuantize, biases) - 24usize];
    ["Offset of field: CqQuantize::absmax"][::core::mem::offset_of!(CqQuantize, absmax) - 32usize];
    ["Offset of field: CqQuantize::unused"][::core::mem::offset_of!(CqQuantize, unused) - 36usize];
    ["Offset of field: CqQuantize::groups"][::core::mem::offset_of!(CqQuantize, groups) - 40usize];
    ["Offset of field: CqQuantize::group_size"][::core::mem::offset_of!(CqQuantize, group_size) - 48usize];
    ["Offset of field: CqQuantize::dtype"][::core::mem::offset_of!(CqQuantize, dtype) - 52usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqFillBias {
    pub bias: *const ::core::ffi::c_void,
    pub y: *mut ::core::ffi::c_void,
    pub rows: u32,
    pub m: u32,
    pub bias_dtype: u32,
    pub y_dtype: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqFillBias"][::core::mem::size_of::<CqFillBias>() - 32usize];
    ["Alignment of CqFillBias"][::core::mem::align_of::<CqFillBias>() - 8usize];
    ["Offset of field: CqFillBias::bias"][::core::mem::offset_of!(CqFillBias, bias) - 0usize];
    ["Offset of field: CqFillBias::y"][::core::mem::offset_of!(CqFillBias, y) - 8usize];
    ["Offset of field: CqFillBias::rows"][::core::mem::offset_of!(CqFillBias, rows) - 16usize];
    ["Offset of field: CqFillBias::m"][::core::mem::offset_of!(CqFillBias, m) - 20usize];
    ["Offset of field: CqFillBias::bias_dtype"][::core::mem::offset_of!(CqFillBias, bias_dtype) - 24usize];
    ["Offset of field: CqFillBias::y_dtype"][::core::mem::offset_of!(CqFillBias, y_dtype) - 28usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqAbsmax {
    pub numbers: *const ::core::ffi::c_void,
    pub bits: *mut u32,
    pub count: u64,
    pub dtype: u32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqAbsmax"][::core::mem::size_of::<CqAbsmax>() - 32usize];
    ["Alignment of CqAbsmax"][::core::mem::align_of::<CqAbsmax>() - 8usize];
    ["Offset of field: CqAbsmax::numbers"][::core::mem::offset_of!(CqAbsmax, numbers) - 0usize];
    ["Offset of field: CqAbsmax::bits"][::core::mem::offset_of!(CqAbsmax, bits) - 8usize];
    ["Offset of field: CqAbsmax::count"][::core::mem::offset_of!(CqAbsmax, count) - 16usize];
    ["Offset of field: CqAbsmax::dtype"][::core::mem::offset_of!(CqAbsmax, dtype) - 24usize];
    ["Offset of field: CqAbsmax::unused"][::core::mem::offset_of!(CqAbsmax, unused) - 28usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqSampleRow {
    pub largest: u64,
    pub need: u64,
    pub arrivals: u32,
    pub logit_key: u32,
    pub logit_ties: u32,
    pub weight: u32,
    pub weight_ties: u32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqSampleRow"][::core::mem::size_of::<CqSampleRow>() - 40usize];
    ["Alignment of CqSampleRow"][::core::mem::align_of::<CqSampleRow>() - 8usize];
    ["Offset of field: CqSampleRow::largest"][::core::mem::offset_of!(CqSampleRow, largest) - 0usize];
    ["Offset of field: CqSampleRow::need"][::core::mem::offset_of!(CqSampleRow, need) - 8usize];
    ["Offset of field: CqSampleRow::arrivals"][::core::mem::offset_of!(CqSampleRow, arrivals) - 16usize];
    ["Offset of field: CqSampleRow::logit_key"][::core::mem::offset_of!(CqSampleRow, logit_key) - 20usize];
    ["Offset of field: CqSampleRow::logit_ties"][::core::mem::offset_of!(CqSampleRow, logit_ties) - 24usize];
    ["Offset of field: CqSampleRow::weight"][::core::mem::offset_of!(CqSampleRow, weight) - 28usize];
    ["Offset of field: CqSampleRow::weight_ties"]
        [::core::mem::offset_of!(CqSampleRow, weight_ties) - 32usize];
    ["Offset of field: CqSampleRow::unused"][::core::mem::offset_of!(CqSampleRow, unused) - 36usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqSampleShare {
    pub above: u64,
    pub logit_ties: u32,
    pub weight_ties: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqSampleShare"][::core::mem::size_of::<CqSampleShare>() - 16usize];
    ["Alignment of CqSampleShare"][::core::mem::align_of::<CqSampleShare>() - 8usize];
    ["Offset of field: CqSampleShare::above"][::core::mem::offset_of!(CqSampleShare, above) - 0usize];
    ["Offset of field: CqSampleShare::logit_ties"]
        [::core::mem::offset_of!(CqSampleShare, logit_ties) - 8usize];
    ["Offset of field: CqSampleShare::weight_ties"]
        [::core::mem::offset_of!(CqSampleShare, weight_ties) - 12usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct CqSample {
    pub logits: *const ::core::ffi::c_void,
    pub ids: *mut u32,
    pub rows: *mut CqSampleRow,
    pub bins: *mut u64,
    pub shares: *mut CqSampleShare,
    pub draw: *const u64,
    pub seed: u64,
    pub step: u64,
    pub top_p: u64,
    pub vocabulary: u32,
    pub share: u32,
    pub dtype: u32,
    pub top_k: u32,
    pub least_weight: u32,
    pub digit: u32,
    pub temperature: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of CqSample"][::core::mem::size_of::<CqSample>() - 104usize];
    ["Alignment of CqSample"][::core::mem::align_of::<CqSample>() - 8usize];
    ["Offset of field: CqSample::logits"][::core::mem::offset_of!(CqSample, logits) - 0usize];
    ["Offset of field: CqSample::ids"][::core::mem::offset_of!(CqSample, ids) - 8usize];
    ["Offset of field: CqSample::rows"][::core::mem::offset_of!(CqSample, rows) - 16usize];
    ["Offset of field: CqSample::bins"][::core::mem::offset_of!(CqSample, bins) - 24usize];
    ["Offset of field: CqSample::shares"][::core::mem::offset_of!(CqSample, shares) - 32usize];
    ["Offset of field: CqSample::draw"][::core::mem::offset_of!(CqSample, draw) - 40usize];
    ["Offset of field: CqSample::seed"][::core::mem::offset_of!(CqSample, seed) - 48usize];
    ["Offset of field: CqSample::step"][::core::mem::offset_of!(CqSample, step) - 56usize];
    ["Offset of field: CqSample::top_p"][::core::mem::offset_of!(CqSample, top_p) - 64usize];
    ["Offset of field: CqSample::vocabulary"][::core::mem::offset_of!(CqSample, vocabulary) - 72usize];
    ["Offset of field: CqSample::share"][::core::mem::offset_of!(CqSample, share) - 76usize];
    ["Offset of field: CqSample::dtype"][::core::mem::offset_of!(CqSample, dtype) - 80usize];
    ["Offset of field: CqSample::top_k"][::core::mem::offset_of!(CqSample, top_k) - 84usize];
    ["Offset of field: CqSample::least_weight"][::core::mem::offset_of!(CqSample, least_weight) - 88usize];
    ["Offset of field: CqSample::digit"][::core::mem::offset_of!(CqSample, digit) - 92usize];
    ["Offset of field: CqSample::temperature"][::core::mem::offset_of!(CqSample, temperature) - 96usize];
    ["Offset of field: CqSample::unused"][::core::mem::offset_of!(CqSample, unused) - 100usize];
};
