//! Which instruction sets this CPU has, and which one is used.

#[cfg(target_arch = "x86_64")]
use super::amx_tile::Amx;
#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::avx512::{Avx512, Avx512Vnni};
#[cfg(target_arch = "aarch64")]
use super::neon::{Neon, NeonDotprod, NeonI8mm};
use super::portable::Portable;
use std::sync::OnceLock;

/// An instruction set that this CPU has. The values inside prove it.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) enum InstructionSet {
    Portable(Portable),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    #[cfg(target_arch = "aarch64")]
    NeonDotprod(NeonDotprod),
    #[cfg(target_arch = "aarch64")]
    NeonI8mm(NeonI8mm),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512Vnni),
    #[cfg(target_arch = "x86_64")]
    Avx512Amx(Amx),
}

impl InstructionSet {
    /// For `CANDLE_QUANT_SIMD` and for reports.
    pub(in crate::backend::cpu) fn name(&self) -> &'static str {
        match self {
            Self::Portable(_) => "portable",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod(_) => "neondotprod",
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm(_) => "neoni8mm",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(_) => "avx512vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Amx(_) => "avx512amx",
        }
    }

    /// The same without tiles: kernels on them compute whole outputs, which threads cannot share out row by row.
    pub(in crate::backend::cpu) fn without_tiles(self) -> Self {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Amx(isa) => Self::Avx512Vnni(isa.vnni),
            other => other,
        }
    }
}

/// Every instruction set that this CPU has, best first; the portable one is always there.
pub(in crate::backend::cpu) fn available() -> &'static [InstructionSet] {
    static AVAILABLE: OnceLock<Vec<InstructionSet>> = OnceLock::new();
    AVAILABLE.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        let native = [
            Amx::new().map(InstructionSet::Avx512Amx),
            Avx512Vnni::new().map(InstructionSet::Avx512Vnni),
            Avx512::new().map(InstructionSet::Avx512),
            Avx2::new().map(InstructionSet::Avx2),
        ];
        #[cfg(target_arch = "aarch64")]
        let native = [
            NeonI8mm::new().map(InstructionSet::NeonI8mm),
            NeonDotprod::new().map(InstructionSet::NeonDotprod),
            Neon::new().map(InstructionSet::Neon),
        ];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let native: [Option<InstructionSet>; 0] = [];
        native.into_iter().flatten().chain([InstructionSet::Portable(Portable)]).collect()
    })
}

/// The same for tests, which have AMX on CPUs without it, too, if slowly.
#[cfg(test)]
pub(in crate::backend::cpu) fn tested() -> &'static [InstructionSet] {
    static TESTED: OnceLock<Vec<InstructionSet>> = OnceLock::new();
    TESTED.get_or_init(|| {
        let all = available().iter().copied();
        #[cfg(target_arch = "x86_64")]
        let all = all.chain(Amx::emulated().map(InstructionSet::Avx512Amx));
        all.collect()
    })
}

/// The instruction set in use: the best there is, or the one that the environment variable
/// `CANDLE_QUANT_SIMD` names (`avx512amx`, `avx512vnni`, `avx512`, `avx2`, `neoni8mm`, `neondotprod`, `neon`, `portable`) if this CPU has it.
pub(in crate::backend::cpu) fn best() -> &'static InstructionSet {
    static BEST: OnceLock<InstructionSet> = OnceLock::new();
    BEST.get_or_init(|| {
        let wanted = std::env::var("CANDLE_QUANT_SIMD").unwrap_or_default();
        let named = available().iter().find(|isa| isa.name() == wanted);
        if named.is_none() && !wanted.is_empty() {
            log::warn!("CANDLE_QUANT_SIMD={wanted}: not an instruction set of this CPU, ignored");
        }
        named.or(available().first()).copied().unwrap_or(InstructionSet::Portable(Portable))
    })
}

/// Whether Intel made the CPU.
#[cfg(target_arch = "x86_64")]
pub(in crate::backend::cpu) fn is_of_intel() -> bool {
    static IS_INTEL: OnceLock<bool> = OnceLock::new();
    *IS_INTEL.get_or_init(|| {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    })
}

/// Whether the CPU is one of AMD with a first-level cache of 48 KiB or more for data (Zen 5); on one of Intel,
/// fetching to it alone halves what a core reads (benches/results/2026-11-30-xeon-2-cores/streams.md).
#[cfg(target_arch = "x86_64")]
pub(in crate::backend::cpu) fn has_large_first_cache() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const EXTENDED: u32 = 0x8000_0000;
    const CACHES: u32 = 0x8000_001D;
    static IS_LARGE: OnceLock<bool> = OnceLock::new();
    *IS_LARGE.get_or_init(|| {
        // Intel's have no such leaf.
        if __cpuid(EXTENDED).eax < CACHES {
            return false;
        }
        // Zeros, where a machine hides it, are no cache.
        let first = __cpuid_count(CACHES, 0);
        let part =
            |register: u32, shift: u32, bits: u32| u64::from(register >> shift & ((1 << bits) - 1)) + 1;
        let bytes = part(first.ebx, 22, 10)
            * part(first.ebx, 12, 10)
            * part(first.ebx, 0, 12)
            * (u64::from(first.ecx) + 1);
        first.eax & 0x1F == 1 && bytes >= 48 << 10
    })
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    use super::{has_large_first_cache, is_of_intel};
    use std::fs::read_to_string;

    #[test]
    fn the_vendor_is_the_one_that_linux_says() {
        let Ok(text) = read_to_string("/proc/cpuinfo") else { return };
        assert_eq!(is_of_intel(), text.contains("GenuineIntel"));
    }

    #[test]
    fn the_first_cache_is_as_large_as_linux_says() {
        let is_amd = read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("AuthenticAMD"));
        // The first one of data is number 0. A sandbox may hide it.
        let size = read_to_string("/sys/devices/system/cpu/cpu0/cache/index0/size").ok();
        match size.and_then(|size| size.trim().strip_suffix('K')?.parse::<u32>().ok()) {
            Some(kib) => assert_eq!(has_large_first_cache(), is_amd && kib >= 48, "{kib} KiB"),
            None => assert!(is_amd || !has_large_first_cache()),
        }
    }
}
