//! candle-quant-nn has every public item of candle_nn, with the same signature.
//!
//! `build/` reads candle_nn's source and writes a function for each item, with candle_nn's signature and a call of ours.
//! It compiles if ours is the same. Comments over the functions name the items.
//! Those of [`differences`] are known not to be.

extern crate self as interface;

pub mod auto_traits;

#[allow(clippy::all, dead_code, deprecated, unused_imports, unused_variables)]
#[deny(unused_unsafe)]
mod checks {
    include!(concat!(env!("OUT_DIR"), "/interface.rs"));
}

/// Where the two differ, and why. Whoever removes a difference sees its example fail here.
#[allow(non_snake_case)]
pub mod differences {
    include!(concat!(env!("OUT_DIR"), "/differences.rs"));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    include!(concat!(env!("OUT_DIR"), "/counts.rs"));
    include!(concat!(env!("OUT_DIR"), "/features.rs"));

    /// Cargo refuses a dependency that lacks a feature it is asked for.
    #[test]
    fn every_feature_exists() {
        assert_eq!(MISSING_FEATURES, [""; 0], "features of candle_nn that crates/nn lacks");
    }

    #[test]
    fn every_public_item_is_checked() {
        let count = |counts: &[(&'static str, usize)], kind| {
            counts.iter().filter(|(name, _)| *name == kind).map(|(_, count)| count).sum::<usize>()
        };
        let written: BTreeMap<_, _> = WRITTEN.iter().copied().collect();
        for (kind, written) in written {
            assert_eq!(
                count(CHECKED, kind) + count(OFF, kind),
                written,
                "public {kind} in candle_nn's source"
            );
        }
        assert!(count(CHECKED, "fn") > 250, "candle_nn 0.11 has more: {CHECKED:?}");
    }
}
