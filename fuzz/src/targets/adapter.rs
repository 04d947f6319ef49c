//! Files of adapters. An input is the directory of one.

use super::folder_of;
use crate::Bundle;
use candle_core::Device;
use candle_quant::checkpoint::AdapterFile;

/// Opens an adapter and loads all of it.
pub(super) fn run(bundle: &Bundle) -> bool {
    let folder = folder_of(bundle);
    let file = match AdapterFile::open(folder.path().join(&bundle.open)) {
        Ok(file) => file,
        Err(error) => {
            let _ = error.to_string();
            return false;
        }
    };
    for (module, lora) in file.loras() {
        let loaded = lora.load(&Device::Cpu).expect("a tensor whose bytes are there");
        let [stack @ .., n, k] = lora.dims() else { panic!("{module}: {:?}", lora.dims()) };
        assert_eq!(loaded.a.dims(), [stack, &[lora.rank(), *k]].concat(), "{module}");
        assert_eq!(loaded.b.dims(), [stack, &[*n, lora.rank()]].concat(), "{module}");
        assert!(lora.scale().is_finite(), "{module}");
    }
    true
}
