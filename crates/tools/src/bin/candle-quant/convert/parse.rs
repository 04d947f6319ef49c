//! Values of options.

use candle_quant::Error;
use candle_quant_tools::convert::{Role, Rule, Spec};

pub fn parse_spec(text: &str) -> Result<Spec, String> {
    text.parse().map_err(|error: Error| error.to_string())
}

fn split(text: &str) -> Result<(&str, Spec), String> {
    let (left, spec) = text.rsplit_once('=').ok_or("expected an equals sign")?;
    Ok((left, parse_spec(spec)?))
}

pub fn parse_role(text: &str) -> Result<(Role, Spec), String> {
    let (role, spec) = split(text)?;
    Ok((role.parse().map_err(|error: Error| error.to_string())?, spec))
}

pub fn parse_tensors(text: &str) -> Result<(String, Spec), String> {
    let (glob, spec) = split(text)?;
    Rule::tensors(glob, spec).map_err(|error| error.to_string())?;
    Ok((glob.to_owned(), spec))
}

pub fn parse_bits(text: &str) -> Result<f64, String> {
    let bits = text.parse::<f64>().ok().filter(|bits| bits.is_finite() && *bits > 0.);
    bits.ok_or_else(|| "expected a number above zero".into())
}

pub fn parse_limit(text: &str) -> Result<f64, String> {
    let limit = text.parse::<f64>().ok().filter(|limit| limit.is_finite() && *limit >= 0.);
    limit.ok_or_else(|| "expected a finite number, zero or above".into())
}
