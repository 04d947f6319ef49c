//! The kernels of `cuda/` by name.

use super::bindings::{CQ_ATTEND_THREADS, CQ_THREADS};
use super::formats::{GemvKernels, TileKernels};
use crate::KvFormat;
use std::fmt;

/// A kernel of `cuda/`. Those of a format have its name in them; [`super::formats`] makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    /// The tensor-core GEMV of up to `rows` rows of x.
    Gemv {
        format: GemvKernels,
        rows: usize,
    },
    /// The tensor-core GEMV of one row of x with each of the experts that were chosen for it.
    GemvExperts(GemvKernels),
    /// The fp32 matmul.
    Simt(&'static str),
    /// That of dense weights, of up to `rows` rows of x.
    Dense {
        rows: usize,
    },
    /// Rows of a dense table.
    Embed,
    /// The fp32 matmul of tiles of pairs with their experts.
    SimtExperts(&'static str),
    /// The tensor-core GEMM of up to `columns` rows of x at a time, also of tiles of pairs with their experts.
    Tiles {
        format: TileKernels,
        columns: usize,
    },
    /// x as that takes it.
    TilesX,
    SortPairs,
    WeightedSum,
    /// Which experts a token uses.
    Route,
    /// Attention of one new token of each sequence, on tensor cores.
    Attend {
        head_dim: usize,
        bf16: bool,
    },
    /// The same in f32.
    AttendF32,
    /// The same to a cache of codes.
    AttendCodes {
        head_dim: usize,
        keys: KvFormat,
        values: KvFormat,
    },
    /// Attention of several new tokens of each sequence, on tensor cores.
    AttendPrompt {
        head_dim: usize,
        bf16: bool,
    },
    /// The same to a cache of codes.
    AttendPromptCodes {
        head_dim: usize,
    },
    /// Their keys and values as codes.
    AppendCodes {
        head_dim: usize,
    },
    /// Linear attention by the gated delta rule. It starts early, if so, with a state that was complete before the kernel ahead was
    /// launched. For heads of keys and of values with so many elements, or for those that only the launch knows.
    DeltaNet {
        head_dim: Option<usize>,
        starts_early: bool,
    },
    Dequantize(&'static str),
    Quantize(&'static str),
    FillBias,
    Absmax,
    Sample(SampleKernel),
    /// A norm of rows.
    Norm,
    /// Rows in another order, and a norm of them if they have one.
    Order,
    /// What becomes of outputs, by itself.
    Elementwise,
}

/// The launches of a draw, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SampleKernel {
    Largest,
    Logits,
    Weights,
    Draw,
}

impl Kernel {
    /// The source file, without its extension.
    pub(super) fn file(self) -> &'static str {
        match self {
            Self::Gemv { format, .. } | Self::GemvExperts(format) => format.file,
            Self::Simt(_) | Self::SimtExperts(_) => "simt",
            Self::Tiles { format, .. } => format.file,
            Self::TilesX => "tiles_x",
            Self::SortPairs | Self::WeightedSum => "experts",
            Self::Route => "route",
            Self::Attend { .. } | Self::AttendF32 => "attend",
            Self::AttendCodes { .. } => "attend_codes",
            Self::AttendPrompt { .. } => "attend_prompt",
            Self::AttendPromptCodes { .. } | Self::AppendCodes { .. } => "attend_prompt_codes",
            Self::DeltaNet { .. } => "delta_net",
            Self::Dequantize(_) => "dequantize",
            Self::Quantize(_) => "quantize",
            Self::FillBias => "fill_bias",
            Self::Absmax => "absmax",
            Self::Sample(_) => "sample",
            Self::Norm | Self::Order | Self::Elementwise => "rows",
            Self::Dense { .. } | Self::Embed => "dense",
        }
    }

    /// Threads of a block.
    pub(super) fn threads(self) -> u32 {
        if self.is_of_attention() {
            CQ_ATTEND_THREADS
        } else {
            CQ_THREADS
        }
    }

    fn is_of_attention(self) -> bool {
        matches!(
            self,
            Self::Attend { .. }
                | Self::AttendF32
                | Self::AttendCodes { .. }
                | Self::AttendPrompt { .. }
                | Self::AttendPromptCodes { .. }
                | Self::AppendCodes { .. }
        )
    }

    /// Whether a block may have all shared memory of a multiprocessor, if need be.
    pub(super) fn may_stay_alone(self) -> bool {
        matches!(self, Self::Tiles { .. } | Self::DeltaNet { .. }) || self.is_of_attention()
    }

    /// Whether it may start before the kernel ahead of it in the stream has finished, for which it
    /// waits itself.
    pub(super) fn starts_early(self) -> bool {
        match self {
            Self::Gemv { .. } | Self::GemvExperts(_) | Self::Simt(_) | Self::SimtExperts(_) => true,
            Self::Tiles { .. } | Self::TilesX | Self::SortPairs | Self::WeightedSum | Self::Sample(_) => true,
            Self::Route | Self::Dense { .. } | Self::Embed => true,
            Self::Attend { .. } | Self::AttendF32 | Self::AttendCodes { .. } => true,
            Self::AttendPrompt { .. } | Self::AttendPromptCodes { .. } | Self::AppendCodes { .. } => true,
            Self::DeltaNet { starts_early, .. } => starts_early,
            Self::Norm | Self::Order | Self::Elementwise => true,
            Self::Dequantize(_) | Self::Quantize(_) | Self::FillBias | Self::Absmax => false,
        }
    }
}

/// The kernel's name.
impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gemv { format, rows } => write!(f, "gemv_{format}_m{rows}"),
            Self::GemvExperts(format) => write!(f, "gemv_{format}_experts"),
            Self::Simt(format) => write!(f, "simt_{format}"),
            Self::SimtExperts(format) => write!(f, "simt_{format}_experts"),
            Self::Tiles { format, columns } => write!(f, "tiles_{format}_c{columns}"),
            Self::TilesX => f.write_str("tiles_x"),
            Self::Dense { rows } => write!(f, "dense_m{rows}"),
            Self::Embed => f.write_str("embed"),
            Self::SortPairs => f.write_str("experts_sort"),
            Self::Attend { head_dim, bf16 } => {
                write!(f, "attend_{}_d{head_dim}", if *bf16 { "bf16" } else { "f16" })
            }
            Self::AttendF32 => f.write_str("attend_f32"),
            Self::AttendPrompt { head_dim, bf16 } => {
                write!(f, "attend_prompt_{}_d{head_dim}", if *bf16 { "bf16" } else { "f16" })
            }
            Self::AttendCodes { head_dim, keys, values } => {
                write!(f, "attend_k{}_v{}_d{head_dim}", keys.bits(), values.bits())
            }
            Self::AttendPromptCodes { head_dim } => write!(f, "attend_prompt_codes_d{head_dim}"),
            Self::AppendCodes { head_dim } => write!(f, "append_codes_d{head_dim}"),
            Self::DeltaNet { head_dim: None, .. } => f.write_str("delta_net"),
            Self::DeltaNet { head_dim: Some(head_dim), .. } => write!(f, "delta_net_d{head_dim}"),
            Self::WeightedSum => f.write_str("experts_sum"),
            Self::Route => f.write_str("route"),
            Self::Dequantize(format) => write!(f, "dequantize_{format}"),
            Self::Quantize(format) => write!(f, "quantize_{format}"),
            Self::FillBias => f.write_str("fill_bias"),
            Self::Absmax => f.write_str("absmax"),
            Self::Sample(SampleKernel::Largest) => f.write_str("sample_largest"),
            Self::Sample(SampleKernel::Logits) => f.write_str("sample_logits"),
            Self::Sample(SampleKernel::Weights) => f.write_str("sample_weights"),
            Self::Sample(SampleKernel::Draw) => f.write_str("sample_draw"),
            Self::Norm => f.write_str("norm_rows"),
            Self::Order => f.write_str("order_rows"),
            Self::Elementwise => f.write_str("elementwise"),
        }
    }
}

impl fmt::Display for GemvKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group_size {
            Some(group_size) => write!(f, "{}_g{group_size}", self.name),
            None => f.write_str(self.name),
        }
    }
}

impl fmt::Display for TileKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.several {
            true => write!(f, "{}_g{}", self.name, self.group),
            false => f.write_str(self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::attend;
    use super::super::bindings::{
        CQ_DELTA_SHARED_BYTES, CQ_MOST_ROUTED_EXPERTS, CQ_NORM_SHARED_BYTES, CQ_QUANTIZE_SHARED_BYTES,
        CQ_SAMPLE_SHARED_BYTES, CQ_SIMT_SHARED_BYTES,
    };
    use super::super::formats::FormatKernels;
    use super::super::gemv::{ExpertGemv, Gemv, GemvShape, Outputs};
    use super::super::plan::{self, SharedBytes};
    use super::super::tiles;
    use super::*;
    use crate::{DeviceKvCache, QuantFormat};
    use serde_json::json;
    use std::collections::{BTreeMap, BTreeSet};
    use std::fs;
    use std::process::Command;

    /// (source file, kernel)
    type Names = BTreeSet<(String, String)>;

    /// Every format, also those that are only read.
    fn formats() -> Vec<QuantFormat> {
        QuantFormat::all().into_iter().chain(QuantFormat::only_read()).collect()
    }

    /// What the crate can launch, for weights of any format, shape and alignment, and any x.
    fn launched() -> Vec<Kernel> {
        let mut kernels = vec![Kernel::SortPairs, Kernel::WeightedSum, Kernel::FillBias, Kernel::Absmax];
        kernels.extend([Kernel::AttendF32, Kernel::Norm, Kernel::Order, Kernel::Elementwise, Kernel::Route]);
        kernels.extend([Kernel::Embed, Kernel::TilesX]);
        let sizes = [None, Some(128)];
        kernels.extend(sizes.map(|head_dim| Kernel::DeltaNet { head_dim, starts_early: true }));
        kernels.extend(plan::DENSE_ROWS_OF_X.map(|rows| Kernel::Dense { rows }));
        let halves = [false, true];
        for (head_dim, bf16) in DeviceKvCache::KERNEL_HEAD_DIMS
            .into_iter()
            .flat_map(|head_dim| halves.map(|bf16| (head_dim, bf16)))
        {
            kernels.extend([Kernel::Attend { head_dim, bf16 }, Kernel::AttendPrompt { head_dim, bf16 }]);
        }
        for head_dim in DeviceKvCache::KERNEL_HEAD_DIMS {
            kernels.extend([Kernel::AttendPromptCodes { head_dim }, Kernel::AppendCodes { head_dim }]);
            let codes = [KvFormat::Affine8, KvFormat::Affine4];
            let pairs = codes.into_iter().flat_map(|keys| codes.map(|values| (keys, values)));
            kernels.extend(pairs.map(|(keys, values)| Kernel::AttendCodes { head_dim, keys, values }));
        }
        use SampleKernel::{Draw, Largest, Logits, Weights};
        kernels.extend([Largest, Logits, Weights, Draw].map(Kernel::Sample));
        for format in formats() {
            let of_format = FormatKernels::of(format).unwrap();
            kernels.extend([of_format.dequantize(), of_format.simt(), of_format.simt_experts()]);
            let of_tiles = of_format.tiles();
            kernels.extend(tiles::COLUMNS.map(|columns| Kernel::Tiles { format: of_tiles, columns }));
            if QuantFormat::all().contains(&format.with_biases()) {
                kernels.push(of_format.quantize());
            }
            let Some(gemv) = of_format.gemv() else { continue };
            for k in (1..=40).map(|groups| groups * format.group_size()) {
                for alignment in [4, 8, 16, 256] {
                    let shapes = (1..=32).filter_map(|m| GemvShape::choose(format, m, k, alignment));
                    kernels.extend(shapes.map(|shape| Kernel::Gemv { format: gemv, rows: shape.rows }));
                    let experts = ExpertGemv::plan(format, 64, Outputs::Each, 4, k, alignment, 48 << 10);
                    kernels.extend(experts.map(|_| Kernel::GemvExperts(gemv)));
                }
            }
        }
        kernels
    }

    /// What the compiler sees in `cuda/`: the preprocessor leaves the names in place of the kernels' heads.
    fn compiled() -> Names {
        let stub = tempfile::tempdir().unwrap();
        fs::write(stub.path().join("emulator.h"), "").unwrap();
        let mut names = Names::new();
        for source in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/cuda")).unwrap() {
            let source = source.unwrap().path();
            if source.extension().is_none_or(|extension| extension != "cu") {
                continue;
            }
            let mut compiler = Command::new(std::env::var("CXX").unwrap_or("c++".into()));
            compiler.args(["-E", "-P", "-std=c++17", "-DCANDLE_QUANT_EMULATED", "-x", "c++", "-I"]);
            let done = compiler.args([stub.path(), &source]).output().expect("a C++ compiler");
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            let text = String::from_utf8(done.stdout).unwrap();
            let file = source.file_stem().unwrap().to_str().unwrap();
            let heads = text.split("EMULATED_KERNEL(").skip(1);
            let of_file = heads.map(|head| head.split(',').next().unwrap_or_default().trim().to_string());
            names.extend(of_file.map(|name| (file.to_string(), name)));
        }
        names
    }

    #[test]
    fn the_crate_launches_every_kernel_that_is_compiled_and_no_other() {
        let name = |kernel: Kernel| (kernel.file().to_string(), kernel.to_string());
        let (launched, compiled): (Names, _) = (launched().into_iter().map(name).collect(), compiled());
        let missing: Vec<_> = launched.difference(&compiled).collect();
        assert!(missing.is_empty(), "not in cuda/: {missing:?}");
        let dead: Vec<_> = compiled.difference(&launched).collect();
        assert!(dead.is_empty(), "never launched: {dead:?}");
    }

    /// The most shared memory of a block on an H200, by the programming guide's "technical specifications per compute capability".
    const H200_SHARED_BYTES: usize = (228 << 10) / 2 - (1 << 10);
    const H200: SharedBytes = SharedBytes { of_two: H200_SHARED_BYTES, of_one: 227 << 10 };

    /// The most shared memory that a launch asks for.
    fn most_shared_bytes(kernel: Kernel) -> usize {
        match kernel {
            Kernel::Gemv { .. } | Kernel::GemvExperts(_) => H200_SHARED_BYTES,
            Kernel::Simt(_) | Kernel::SimtExperts(_) => CQ_SIMT_SHARED_BYTES as usize,
            Kernel::Tiles { format, columns } => tiles::most_shared_bytes(format, columns, H200),
            Kernel::SortPairs => plan::sort_shared_bytes(plan::MOST_GROUPED_EXPERTS),
            Kernel::Attend { head_dim, .. } | Kernel::AttendCodes { head_dim, .. } => {
                let stages = [2, 1].map(|stages| attend::shared_bytes(kernel, head_dim, stages));
                stages.into_iter().find(|bytes| *bytes <= H200_SHARED_BYTES).expect("a tile fits")
            }
            Kernel::AttendF32 => attend::shared_bytes(kernel, 256, 1),
            Kernel::AttendPrompt { head_dim, .. } => 2 * attend::prompt_tile_bytes(head_dim),
            Kernel::AttendPromptCodes { head_dim } => {
                attend::prompt_codes_shared_bytes(head_dim, [KvFormat::Affine8; 2], 2)
            }
            Kernel::AppendCodes { .. } => 0,
            Kernel::Quantize(_) => CQ_QUANTIZE_SHARED_BYTES as usize,
            Kernel::Sample(_) => CQ_SAMPLE_SHARED_BYTES as usize,
            Kernel::Norm | Kernel::Order | Kernel::TilesX => CQ_NORM_SHARED_BYTES as usize,
            Kernel::Dense { rows } => plan::dense_shared_bytes(rows),
            Kernel::DeltaNet { .. } => CQ_DELTA_SHARED_BYTES as usize,
            Kernel::Route => plan::route_shared_bytes(CQ_MOST_ROUTED_EXPERTS as usize),
            Kernel::WeightedSum | Kernel::Dequantize(_) | Kernel::FillBias | Kernel::Absmax => 0,
            Kernel::Elementwise | Kernel::Embed => 0,
        }
    }

    /// What the gate on machine code has to know of launches (testing/sass), a line for each.
    fn facts_for_the_sass_gate() -> String {
        let others = launched().into_iter().filter(|kernel| kernel.threads() != CQ_THREADS);
        let threads: BTreeMap<String, u32> =
            others.map(|kernel| (kernel.to_string(), kernel.threads())).collect();
        let threads: Vec<String> =
            threads.iter().map(|(name, threads)| format!("    {name:?}: {threads}")).collect();
        let early = launched().into_iter().filter(|kernel| kernel.starts_early());
        let early: BTreeMap<String, usize> =
            early.map(|kernel| (kernel.to_string(), most_shared_bytes(kernel))).collect();
        let early: Vec<String> = early.iter().map(|(name, bytes)| format!("    {name:?}: {bytes}")).collect();

        let affine = |bits, group| QuantFormat::affine(bits, group).unwrap();
        let timed =
            [affine(4, 64), affine(8, 64), QuantFormat::MXFP4, QuantFormat::NVFP4, QuantFormat::MXFP8];
        let shapes = [(4096, 4096), (6144, 4096), (14336, 4096), (28672, 4096), (4096, 14336)];
        let launch = |format, (n, k): (usize, usize)| {
            let plan = Gemv::plan(format, &[n], Outputs::Each, 1, k, 256, H200_SHARED_BYTES).unwrap();
            let gemv = FormatKernels::of(format).unwrap().gemv().unwrap();
            let kernel = Kernel::Gemv { format: gemv, rows: plan.shape.rows }.to_string();
            let Gemv { blocks, splits, k_per_split, .. } = plan;
            let (threads, k_warps, rows_per_block) =
                (plan::THREADS, plan.shape.k_warps(), plan.shape.rows_per_block());
            format!(
                "    {}",
                json!({"kernel": kernel, "n": n, "k": k, "blocks": blocks, "splits": splits, "k_per_split": k_per_split,
                       "threads": threads, "k_warps": k_warps, "rows_per_block": rows_per_block})
            )
        };
        let gemv: Vec<String> =
            timed.into_iter().flat_map(|format| shapes.map(|shape| launch(format, shape))).collect();
        format!(
            "{{\n  \"starts_early\": {{\n{}\n  }},\n  \"threads\": {{\n{}\n  }},\n  \"gemv\": [\n{}\n  ]\n}}\n",
            early.join(",\n"),
            threads.join(",\n"),
            gemv.join(",\n")
        )
    }

    #[test]
    fn the_sass_gate_knows_the_launches() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/backend/cuda/launches.json");
        let facts = facts_for_the_sass_gate();
        if std::env::var_os("CANDLE_QUANT_WRITE_LAUNCHES").is_some() {
            fs::write(path, &facts).unwrap();
        }
        let known = fs::read_to_string(path).unwrap();
        assert!(known == facts, "launches have changed: run this test with CANDLE_QUANT_WRITE_LAUNCHES=1");
    }

    #[test]
    fn names_say_format_and_rows() {
        let format = QuantFormat::affine(3, 128).unwrap();
        let of_format = FormatKernels::of(format).unwrap();
        let gemv = |format| FormatKernels::of(format).unwrap().gemv().unwrap();
        assert_eq!(Kernel::Gemv { format: gemv(format), rows: 16 }.to_string(), "gemv_a3_g128_m16");
        assert_eq!(Kernel::Gemv { format: gemv(QuantFormat::NVFP4), rows: 1 }.to_string(), "gemv_nvfp4_m1");
        assert_eq!(Kernel::GemvExperts(gemv(format)).to_string(), "gemv_a3_g128_experts");
        let tiles =
            |kernels: FormatKernels| Kernel::Tiles { format: kernels.tiles(), columns: 32 }.to_string();
        assert_eq!(tiles(of_format), "tiles_a3_g64_c32");
        assert_eq!(tiles(FormatKernels::of(QuantFormat::NVFP4).unwrap()), "tiles_nvfp4_c32");
        assert_eq!(of_format.dequantize().to_string(), "dequantize_a3");
    }

    /// The affine GEMV reads biases, which a symmetric weight does not have.
    #[test]
    fn symmetric_formats_have_the_scalar_kernels_of_affine_ones() {
        let of = |format: crate::Result<QuantFormat>| FormatKernels::of(format.unwrap()).unwrap();
        let (symmetric, affine) = (of(QuantFormat::symmetric(4, 64)), of(QuantFormat::affine(4, 64)));
        assert_eq!(symmetric.gemv(), None);
        assert_eq!((symmetric.simt(), symmetric.dequantize()), (affine.simt(), affine.dequantize()));
    }
}
