//! Where a command computes.

use super::terminal;
use candle_core::Device;
use candle_quant::Error;

/// The first GPU, or the CPU if that is wanted. Where there is no GPU it is the CPU, too, and one line says why, unless the
/// program was built for the CPU alone.
pub fn first(cpu: bool) -> Device {
    all(1, cpu).swap_remove(0)
}

/// A device for each of so many ranks: all of them GPUs, or all of them the CPU.
pub fn all(ranks: usize, cpu: bool) -> Vec<Device> {
    if cpu || !cfg!(feature = "cuda") {
        return vec![Device::Cpu; ranks];
    }
    (0..ranks).map(Device::new_cuda).collect::<candle_core::Result<_>>().unwrap_or_else(|error| {
        let error = Error::from(error).to_string();
        let why = in_words(error.lines().next().unwrap_or_default());
        let wanted = if ranks == 1 { "is no GPU".to_owned() } else { format!("are no {ranks} GPUs") };
        terminal::say(&format!("on the CPU, for there {wanted} to use: {why}"));
        vec![Device::Cpu; ranks]
    })
}

/// What a driver's error says, without its number: of `DriverError(CUDA_ERROR_.., "..")` the text.
fn in_words(error: &str) -> &str {
    let text = error.split_once('"').and_then(|(_, rest)| rest.rsplit_once('"'));
    text.map_or(error, |(text, _)| text)
}

#[cfg(test)]
mod tests {
    use super::in_words;

    #[test]
    fn errors_of_drivers_are_told_in_words() {
        let error = r#"DriverError(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")"#;
        assert_eq!(in_words(error), "no CUDA-capable device is detected");
        for other in ["the device is gone", "an unfinished \" quote", ""] {
            assert_eq!(in_words(other), other);
        }
    }
}
