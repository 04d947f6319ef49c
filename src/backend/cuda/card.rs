//! What plans and launches have to know of a device, asked once.

use super::plan::{most_shared_bytes, SharedBytes, ALWAYS_SHARED_BYTES};
use candle_core::cuda_backend::cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::cuda_backend::WrapErr;
use candle_core::Result;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

/// The driver that first lets a CUDA graph keep the early start of a kernel: 12.3.
const EARLY_START_IN_GRAPHS: i32 = 12030;

/// With `off`, no kernel starts before the one ahead of it has finished: slower, to find out whether that is to blame.
const EARLY_START: &str = "CANDLE_QUANT_EARLY_START";

/// A device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Card {
    /// The most shared memory that a launch may ask for, lest blocks find no room beside others.
    pub(super) most_shared_bytes: usize,
    /// The same of a kernel whose blocks stay alone.
    pub(super) all_shared_bytes: usize,
    pub(super) multiprocessors: usize,
    /// Whether tensor cores multiply bf16.
    pub(super) bf16: bool,
    /// Whether products by way of cuBLAS are twice as fast as those of a warp's tensor-core instructions: on 9.0 and 10.x,
    /// whose tensor cores want more than a warp for that.
    pub(super) fast_cublas: bool,
    pub(super) early_start: EarlyStart,
}

/// When a kernel can start before the one ahead of it has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EarlyStart {
    Never,
    /// The driver knows nothing of it in a CUDA graph.
    OutsideGraphs,
    Always,
}

impl Card {
    /// The device of a context.
    pub(super) fn of(context: &CudaContext) -> Result<Self> {
        static CARDS: LazyLock<Mutex<HashMap<usize, Card>>> = LazyLock::new(Mutex::default);
        let mut cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(card) = cards.get(&context.ordinal()) {
            return Ok(*card);
        }
        let card = Self::ask(context)?;
        cards.insert(context.ordinal(), card);
        Ok(card)
    }

    /// The shared memory that launches plan with.
    pub(super) fn shared(self) -> SharedBytes {
        SharedBytes { of_two: self.most_shared_bytes, of_one: self.all_shared_bytes }
    }

    fn ask(context: &CudaContext) -> Result<Self> {
        let number = |attribute| {
            Ok::<_, candle_core::Error>(context.attribute(attribute).w()?.unsigned_abs() as usize)
        };
        let (major, _) = context.compute_capability().w()?;
        let mut driver = 0;
        // SAFETY: the driver writes its version to a variable that outlives the call.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result().w()?;
        let of_block = number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        Ok(Self {
            all_shared_bytes: of_block.max(ALWAYS_SHARED_BYTES),
            most_shared_bytes: most_shared_bytes(
                of_block,
                number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
                number(Attribute::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)?,
            ),
            multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1),
            bf16: major >= 8,
            fast_cublas: matches!(major, 9 | 10),
            early_start: match (major, driver) {
                _ if std::env::var(EARLY_START).as_deref() == Ok("off") => EarlyStart::Never,
                (..=8, _) => EarlyStart::Never,
                (_, ..EARLY_START_IN_GRAPHS) => EarlyStart::OutsideGraphs,
                (9.., EARLY_START_IN_GRAPHS..) => EarlyStart::Always,
            },
        })
    }
}
