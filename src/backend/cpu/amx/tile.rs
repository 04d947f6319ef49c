//! AMX: whether it may be used, and its instructions.
//!
//! The tile registers live from [`Tiles::configure`] until the value is dropped, on one thread. The compiler
//! never touches them, so what one block of assembly leaves there the next one finds. Threads may be shared with others
//! who use them, as candle does, which configures them once: how they were is remembered.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// Rows of a tile.
pub(super) const ROWS: usize = 16;

/// Columns of a tile of sums, or of a right-hand factor.
pub(super) const COLUMNS: usize = 16;

/// 64 bytes, a row of a tile, as 32-bit words: integers, or the bits of f32 numbers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u32; 16]);

impl Line {
    pub(super) const ZERO: Self = Self([0; 16]);
}

/// The first row of a tile in memory.
#[inline(always)]
pub(super) fn bytes(lines: &[Line]) -> *const u8 {
    lines.as_ptr().cast()
}

/// Whether CPU and operating system let this process use int8 and bf16 tiles. Linux wants to be asked once,
/// for all threads, because tiles make a thread's saved state 8 KiB larger.
pub(super) fn detected() -> bool {
    static DETECTED: OnceLock<bool> = OnceLock::new();
    *DETECTED.get_or_init(|| {
        const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
        const OSXSAVE: u32 = 1 << 27;
        const TILE_STATE: u64 = 1 << 17 | 1 << 18;
        if __cpuid(0).eax < 7 || __cpuid_count(7, 0).edx & BF16_TILE_INT8 != BF16_TILE_INT8 {
            return false;
        }
        // SAFETY: XGETBV exists where OSXSAVE is set.
        let enabled = __cpuid(1).ecx & OSXSAVE != 0 && unsafe { tile_state_enabled(TILE_STATE) };
        enabled && permitted()
    })
}

#[target_feature(enable = "xsave")]
fn tile_state_enabled(state: u64) -> bool {
    // SAFETY: the caller has seen OSXSAVE; register 0 is always there.
    unsafe { _xgetbv(0) & state == state }
}

#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: this call changes nothing but which state the process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// What LDTILECFG reads and STTILECFG writes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// That of registers that are not in use.
    const NONE: Self =
        Self { palette: 0, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
}

/// The tile registers of this thread, configured.
pub(super) struct Tiles {
    before: Config,
}

/// The tile that holds a right-hand factor (activations).
pub(super) const RIGHT: u8 = 7;

/// The tiles that hold left-hand factors (weights).
pub(super) const LEFT: [u8; 2] = [5, 6];

impl Tiles {
    /// Sums of 16 x 16 32-bit lanes in tiles 0 to 4; factors that share `depth` bytes, at most 64.
    ///
    /// # Safety
    /// [`detected`] has returned true; the thread has no other `Tiles`.
    pub(super) unsafe fn configure(depth: usize) -> Self {
        let mut before = Config::NONE;
        let mut config = Config { palette: 1, ..Config::NONE };
        config.bytes_per_row[..8].fill(64);
        config.rows[..8].fill(ROWS as u8);
        for tile in LEFT {
            config.bytes_per_row[usize::from(tile)] = depth as u16;
        }
        config.rows[usize::from(RIGHT)] = (depth / 4) as u8;
        // SAFETY: palette 1 has 8 tiles of up to 16 rows of 64 bytes.
        unsafe {
            asm!("sttilecfg [{}]", in(reg) &mut before, options(nostack, preserves_flags));
            asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, preserves_flags, readonly));
        }
        Self { before }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the tiles were configured on this thread (raw state does not leave it), and so they had been before.
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

// SAFETY (all functions below): `Tiles` exists on this thread; pointers are good for all rows of the tile.

/// Zeros a tile.
#[inline(always)]
pub(super) unsafe fn zero<const TILE: u8>() {
    unsafe { asm!("tilezero tmm{t}", t = const TILE, options(nostack, preserves_flags, nomem)) }
}

/// Reads the rows of a tile, `stride` bytes apart.
#[inline(always)]
pub(super) unsafe fn load<const TILE: u8>(from: *const u8, stride: usize) {
    unsafe {
        asm!("tileloadd tmm{t}, [{from} + {stride}]", t = const TILE, from = in(reg) from,
            stride = in(reg) stride, options(nostack, preserves_flags, readonly));
    }
}

/// Writes a tile of sums.
#[inline(always)]
pub(super) unsafe fn store<const TILE: u8>(to: *mut Line) {
    unsafe {
        asm!("tilestored [{to} + {stride}], tmm{t}", t = const TILE, to = in(reg) to,
            stride = in(reg) 64usize, options(nostack, preserves_flags));
    }
}

/// `sums += left * right`, of signed bytes, four of each in a lane.
#[inline(always)]
pub(super) unsafe fn multiply_digits<const SUMS: u8, const LEFT: u8, const RIGHT: u8>() {
    unsafe {
        asm!("tdpbssd tmm{s}, tmm{l}, tmm{r}", s = const SUMS, l = const LEFT, r = const RIGHT,
            options(nostack, preserves_flags, nomem));
    }
}

/// `sums += left * right`, of bf16 numbers, two of each in a lane.
#[inline(always)]
pub(super) unsafe fn multiply_floats<const SUMS: u8, const LEFT: u8, const RIGHT: u8>() {
    unsafe {
        asm!("tdpbf16ps tmm{s}, tmm{l}, tmm{r}", s = const SUMS, l = const LEFT, r = const RIGHT,
            options(nostack, preserves_flags, nomem));
    }
}
