//! Inputs rounded as some layers were trained with, in candle's own operations.

use candle_core::{D, DType, Result, Tensor};

/// Rows whose magnitudes are all below this have the scale of one that has it, as BitNet has it.
const LEAST: f64 = 1e-5;

/// Each row of x `[.., K]` in whole numbers of `max|x| / 127`
/// ([`ActivationBits::PerToken8`](crate::ActivationBits::PerToken8)).
pub(super) fn rounded(x: &Tensor) -> Result<Tensor> {
    let dtype = x.dtype();
    let wide = match dtype {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32)?,
        _ => x.clone(),
    };
    let step = (wide.abs()?.max_keepdim(D::Minus1)?.maximum(LEAST)? / 127.)?;
    let whole = wide.broadcast_div(&step)?.round()?;
    whole.broadcast_mul(&step)?.to_dtype(dtype)
}

#[cfg(test)]
mod tests {
    use super::rounded;
    use candle_core::{Device, Result, Tensor};

    #[test]
    fn each_row_has_its_step() -> Result<()> {
        let x = [[127f32, 1.4, -0.6], [0., 0., 0.], [-12.7, 0.26, 0.04]];
        let rows = rounded(&Tensor::new(&x, &Device::Cpu)?)?.to_vec2::<f32>()?;
        let expected = [[127., 1., -1.], [0., 0., 0.], [-12.7, 0.3, 0.]];
        for (row, expected) in rows.iter().zip(expected) {
            let near = row.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(near, "{row:?}");
        }
        Ok(())
    }
}
