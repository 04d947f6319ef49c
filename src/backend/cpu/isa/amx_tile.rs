//! AMX (Sapphire Rapids and later): detection, and the instructions of the matrix unit.
//!
//! A tile register holds 16 rows of 64 bytes. The registers are in use from [`Tiles::configure`] until the value is
//! dropped, on one thread. The compiler never touches them, so one block of assembly finds what another has left there.
//! Other code on the same thread may use them too: candle configures them once for each thread. So [`Tiles`] restores
//! the configuration that it found.

#![allow(clippy::undocumented_unsafe_blocks)] // The instructions share the conditions that stand above them.

#[cfg(test)]
mod emulated;

use super::avx512::Avx512Vnni;

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// Rows of a tile.
pub(in crate::backend::cpu) const ROWS: usize = 16;

/// Columns of a tile of sums, or of a right-hand operand.
pub(in crate::backend::cpu) const COLUMNS: usize = 16;

/// 64 bytes, a row of a tile, as 32-bit words: integers, or the bits of f32 numbers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::backend::cpu) struct Line(pub(in crate::backend::cpu) [u32; 16]);

impl Line {
    pub(in crate::backend::cpu) const ZERO: Self = Self([0; 16]);
}

/// The first row of a tile in memory.
#[inline(always)]
pub(in crate::backend::cpu) fn bytes(lines: &[Line]) -> *const u8 {
    lines.as_ptr().cast()
}

/// Proves that the CPU has int8 and bf16 tiles beside [`Avx512Vnni`], and that the operating system lets this process
/// use them.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct Amx {
    pub(in crate::backend::cpu) vnni: Avx512Vnni,
    _private: (),
}

impl Amx {
    pub(super) fn new() -> Option<Self> {
        let vnni = Avx512Vnni::new()?;
        detected().then_some(Self { vnni, _private: () })
    }

    /// With tiles in software, if the CPU has none.
    #[cfg(test)]
    pub(super) fn emulated() -> Option<Self> {
        let vnni = Avx512Vnni::new()?;
        emulated::is_used().then_some(Self { vnni, _private: () })
    }
}

/// Whether CPU and operating system let this process use int8 and bf16 tiles. Linux grants them on request, once for all
/// threads, because tiles make a thread's saved state 8 KiB larger.
fn detected() -> bool {
    static DETECTED: OnceLock<bool> = OnceLock::new();
    *DETECTED.get_or_init(|| {
        const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
        const OSXSAVE: u32 = 1 << 27;
        const TILE_STATE: u64 = 1 << 17 | 1 << 18;
        if __cpuid(0).eax < 7 || __cpuid_count(7, 0).edx & BF16_TILE_INT8 != BF16_TILE_INT8 {
            return false;
        }
        // SAFETY: XGETBV exists where OSXSAVE is set, which `&&` tests first.
        let enabled = __cpuid(1).ecx & OSXSAVE != 0 && unsafe { tile_state_enabled(TILE_STATE) };
        enabled && permitted()
    })
}

#[target_feature(enable = "xsave")]
fn tile_state_enabled(state: u64) -> bool {
    // SAFETY: register 0 exists wherever XGETBV does, and that is a feature of this function.
    unsafe { _xgetbv(0) & state == state }
}

#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: the call takes two integers, and changes only which state the process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// What LDTILECFG reads and STTILECFG writes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// The configuration of registers that are not in use.
    const NONE: Self =
        Self { palette: 0, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
}

/// The tile registers of this thread, configured.
pub(in crate::backend::cpu) struct Tiles {
    before: Config,
}

/// The tile that holds a left-hand operand.
pub(in crate::backend::cpu) const LEFT: u8 = 7;

/// The tiles that hold right-hand operands.
pub(in crate::backend::cpu) const RIGHT: [u8; 2] = [5, 6];

impl Tiles {
    /// Sums of `rows` rows, at most sixteen, of sixteen 32-bit lanes in tiles 0 to 4; operands that share `depth` bytes, at
    /// most 64.
    ///
    /// # Safety
    /// The thread has no other `Tiles`.
    pub(in crate::backend::cpu) unsafe fn configure(_isa: Amx, rows: usize, depth: usize) -> Self {
        let mut before = Config::NONE;
        let mut config = Config { palette: 1, ..Config::NONE };
        config.bytes_per_row[..8].fill(64);
        config.rows[..8].fill(rows as u8);
        config.bytes_per_row[usize::from(LEFT)] = depth as u16;
        for tile in RIGHT {
            config.rows[usize::from(tile)] = (depth / 4) as u8;
        }
        #[cfg(test)]
        if emulated::is_used() {
            return Self { before: emulated::configure(config) };
        }
        // SAFETY: `Amx` proves that the instructions exist. Both configurations are 64 bytes long, and the second is valid:
        // palette 1 has 8 tiles of up to 16 rows of 64 bytes.
        unsafe {
            asm!("sttilecfg [{}]", in(reg) &mut before, options(nostack, preserves_flags));
            asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, preserves_flags, readonly));
        }
        Self { before }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        #[cfg(test)]
        if emulated::is_used() {
            emulated::configure(self.before);
            return;
        }
        // SAFETY: this value exists only where `configure` ran these instructions, on this thread: callers keep it in a
        // local variable. `before` was valid when it was read.
        unsafe {
            match self.before.palette {
                0 => asm!("tilerelease", options(nostack, preserves_flags, nomem)),
                _ => {
                    asm!("ldtilecfg [{}]", in(reg) &self.before, options(nostack, preserves_flags, readonly))
                }
            }
        }
    }
}

// All functions below are instructions on the registers of this thread.
//
// # Safety
// A `Tiles` exists on this thread; pointers are valid for all rows of the tile, as it was configured.

/// Zeros a tile.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn zero<const TILE: u8>() {
    #[cfg(test)]
    if emulated::is_used() {
        return emulated::zero(TILE);
    }
    unsafe { asm!("tilezero tmm{t}", t = const TILE, options(nostack, preserves_flags, nomem)) }
}

/// Reads the rows of a tile, `stride` bytes apart.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn load<const TILE: u8>(from: *const u8, stride: usize) {
    #[cfg(test)]
    if emulated::is_used() {
        return unsafe { emulated::load(TILE, from, stride) };
    }
    unsafe {
        asm!("tileloadd tmm{t}, [{from} + {stride}]", t = const TILE, from = in(reg) from,
            stride = in(reg) stride, options(nostack, preserves_flags, readonly));
    }
}

/// Writes a tile of sums.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn store<const TILE: u8>(to: *mut Line) {
    #[cfg(test)]
    if emulated::is_used() {
        return unsafe { emulated::store(TILE, to.cast(), 64) };
    }
    unsafe {
        asm!("tilestored [{to} + {stride}], tmm{t}", t = const TILE, to = in(reg) to,
            stride = in(reg) 64usize, options(nostack, preserves_flags));
    }
}

/// `sums += left * right` with signed bytes, four of each in a lane.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn multiply_int8<const SUMS: u8, const LEFT: u8, const RIGHT: u8>() {
    #[cfg(test)]
    if emulated::is_used() {
        return emulated::multiply_int8([SUMS, LEFT, RIGHT]);
    }
    unsafe {
        asm!("tdpbssd tmm{s}, tmm{l}, tmm{r}", s = const SUMS, l = const LEFT, r = const RIGHT,
            options(nostack, preserves_flags, nomem));
    }
}

/// `sums += left * right` with bf16 numbers, two of each in a lane.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn multiply_bf16<const SUMS: u8, const LEFT: u8, const RIGHT: u8>() {
    #[cfg(test)]
    if emulated::is_used() {
        return emulated::multiply_bf16([SUMS, LEFT, RIGHT]);
    }
    unsafe {
        asm!("tdpbf16ps tmm{s}, tmm{l}, tmm{r}", s = const SUMS, l = const LEFT, r = const RIGHT,
            options(nostack, preserves_flags, nomem));
    }
}
