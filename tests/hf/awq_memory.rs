//! What weights of AutoAWQ are said to take in memory, against what they take.

use crate::hf::{entry, noise, weight, Entry};
use candle_core::Device;
use serde_json::json;

const N: usize = 64;

/// Scales or biases that are numbers; of what size they are does not matter here.
fn ones(name: &str, dtype: &'static str, dims: &[usize]) -> Entry {
    let one: &[u8] = match dtype {
        "F16" => &[0, 0x3C],
        "BF16" => &[0x80, 0x3F],
        _ => &[0, 0, 0x80, 0x3F],
    };
    entry(name, dtype, dims, one.repeat(dims.iter().product()))
}

/// A weight of rows of `k` in groups of `group`, with scales and zeros of these dtypes.
fn entries(version: &str, group: usize, k: usize, [scales, zeros]: [&'static str; 2]) -> Vec<Entry> {
    let groups = k / group;
    // "gemv" and "gemv_fast" have room for more.
    let unit = match group {
        32 => 32,
        64 => 16,
        _ => 8,
    };
    let room = groups.next_multiple_of(unit);
    let codes = noise(N * k / 2, 41);
    match version {
        "gemm" => vec![
            entry("m.qweight", "I32", &[k, N / 8], codes),
            entry("m.qzeros", "I32", &[groups, N / 8], noise(groups * N / 2, 42)),
            ones("m.scales", scales, &[groups, N]),
        ],
        "marlin" => {
            vec![entry("m.qweight", "I32", &[k / 16, N * 2], codes), ones("m.scales", scales, &[groups, N])]
        }
        "gemv" => vec![
            entry("m.qweight", "I32", &[N, k / 8], codes),
            entry("m.qzeros", "I32", &[N, room / 8], noise(N * room / 2, 42)),
            ones("m.scales", scales, &[N, room]),
        ],
        _ => vec![
            entry("m.qweight", "I16", &[N / 4, k], codes),
            ones("m.qzeros", zeros, &[room, N]),
            ones("m.scales", scales, &[room, N]),
        ],
    }
}

/// Large groups become several small ones, each with scales and biases; room that no group needs is not loaded.
#[test]
fn it_is_what_is_loaded() {
    let dtypes = ["F16", "BF16", "F32"];
    for version in ["gemm", "gemv", "gemv_fast", "marlin"] {
        for (size, k) in [(32, 256), (64, 192), (64, 1024), (128, 384), (256, 768), (-1, 1024), (-1, 192)] {
            for pair in dtypes.iter().flat_map(|scales| dtypes.map(|zeros| [*scales, zeros])) {
                if version != "gemv_fast" && pair[0] != pair[1] {
                    continue;
                }
                let at = format!("{version}, groups of {size} of {k}, {pair:?}");
                let config =
                    json!({"quant_method": "awq", "bits": 4, "group_size": size, "version": version});
                let entries = entries(version, usize::try_from(size).unwrap_or(k), k, pair);
                let whole = weight(&config, &entries).expect(&at);
                let half = whole.narrow(1, k / 3 / 64 * 64..k).unwrap_or_else(|_| whole.clone());
                for part in [whole.narrow(0, 3..9).unwrap(), whole.narrow(0, 4..12).unwrap(), half, whole] {
                    let loaded = part.load(&Device::Cpu).expect(&at).size_in_bytes();
                    assert_eq!(part.loaded_bytes(), loaded as u64, "{at}: {:?}", part.dims());
                }
            }
        }
    }
}
