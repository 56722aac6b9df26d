//! The plain form: float64, one token at a time.

use super::{OP, PagedAppend};
use crate::ops::view::float64;
use crate::ops::{RopeStyle, rms_norm};
use candle_core::{D, Result, Tensor, bail};

/// What [`paged_append`](fn@super::paged_append) gives: the queries `[N, Hq, D]`, and the keys and values that go into
/// the pages, `[N, Hkv, D]` each, in float64; zeros for rows that are no tokens.
///
/// # Errors
/// If a tensor cannot be read as float64, or qkv does not divide into heads.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::{PagedAppend, TokenMap, paged_append};
/// // A query, a key and a value of one element each, as they are: no norms, no rotation.
/// let qkv = Tensor::new(&[[1f32, 2., 3.]], &Device::Cpu)?;
/// let positions = Tensor::new(&[4u32], &Device::Cpu)?;
/// let append = PagedAppend {
///     heads: 1,
///     tokens: TokenMap::OneEach,
///     positions: &positions,
///     rotation: None,
///     norms: None,
/// };
/// assert_eq!(paged_append::reference(&qkv, 1, &append)?, [[1.], [2.], [3.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(qkv: &Tensor, kv_heads: usize, append: &PagedAppend<'_>) -> Result<[Vec<f64>; 3]> {
    let (rows, width) = qkv.dims2()?;
    let heads = append.heads + 2 * kv_heads;
    if heads == 0 || width % heads != 0 {
        bail!("{OP}: qkv is {width} wide, expected a multiple of its {heads} heads");
    }
    let dim = width / heads;
    let positions = append.positions.to_vec1::<u32>()?;
    let owners = append.owners(rows)?;
    let part = |first: usize, n: usize, norm: Option<&Tensor>, rotated: bool| -> Result<Vec<f64>> {
        let x = qkv.narrow(D::Minus1, first * dim, n * dim)?;
        let x = x.reshape((rows, n, dim))?;
        let mut values = match (norm, append.norms) {
            (Some(weight), Some(norms)) if n > 0 => rms_norm::reference(&x, weight, norms.eps)?,
            _ => float64(&x)?,
        };
        for (i, head) in values.chunks_mut(dim).enumerate() {
            let token = i / n;
            if owners[token].is_none() {
                head.fill(0.);
            } else if rotated {
                rotate(head, append, positions[token] as usize)?;
            }
        }
        Ok(values)
    };
    let norms = append.norms;
    Ok([
        part(0, append.heads, norms.map(|n| n.q), true)?,
        part(append.heads, kv_heads, norms.map(|n| n.k), true)?,
        part(append.heads + kv_heads, kv_heads, None, false)?,
    ])
}

/// By the angles of a position.
fn rotate(head: &mut [f64], append: &PagedAppend<'_>, position: usize) -> Result<()> {
    let Some(tables) = append.rotation else {
        return Ok(());
    };
    let row = |table: &Tensor| float64(&table.get(position)?);
    let (cos, sin) = (row(tables.cos)?, row(tables.sin)?);
    let pairs = cos.len();
    for i in 0..pairs {
        let (a, b) = match tables.style {
            RopeStyle::HalfSplit => (i, i + pairs),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let (x, y) = (head[a], head[b]);
        head[a] = x * cos[i] - y * sin[i];
        head[b] = y * cos[i] + x * sin[i];
    }
    Ok(())
}
