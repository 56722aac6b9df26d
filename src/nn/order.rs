//! Matrices whose columns stand in another order than their input.

use candle_core::{D, Device, Result, Tensor, bail};
use std::sync::Arc;

/// In which order a matrix takes its input: its column j multiplies input `order[j]`.
///
/// GPTQ with act order quantizes columns by their importance, so that a group's columns lie apart. Sorted
/// by group at load they are a matrix of ordinary groups, and the input is gathered in the same order
/// before each product.
#[derive(Clone, Debug)]
pub struct InputOrder {
    order: Arc<[u32]>,
    on_device: Tensor,
}

impl PartialEq for InputOrder {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl InputOrder {
    /// From a permutation of `0..order.len()`.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_fused::nn::InputOrder;
    /// let order = InputOrder::new(vec![2, 0, 1], &Device::Cpu)?;
    /// let x = Tensor::new(&[[10f32, 11., 12.]], &Device::Cpu)?;
    /// assert_eq!(order.gather(&x)?.to_vec2::<f32>()?, [[12., 10., 11.]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If an index is missing, comes twice or is out of range.
    pub fn new(order: Vec<u32>, device: &Device) -> Result<Self> {
        let mut seen = vec![false; order.len()];
        for index in &order {
            match seen.get_mut(*index as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => bail!(
                    "order: {index} comes twice or is past the {} inputs, expected a permutation",
                    order.len()
                ),
            }
        }
        let on_device = Tensor::new(order.as_slice(), device)?;
        Ok(Self {
            order: order.into(),
            on_device,
        })
    }

    /// `x` `[.., K]` in the order of the columns.
    ///
    /// # Errors
    /// If the last dimension is not the permutation's.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_fused::nn::InputOrder;
    /// let order = InputOrder::new(vec![2, 0, 1], &Device::Cpu)?;
    /// let x = Tensor::new(&[[10f32, 20., 30.]], &Device::Cpu)?;
    /// assert_eq!(order.gather(&x)?.to_vec2::<f32>()?, [[30., 10., 20.]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn gather(&self, x: &Tensor) -> Result<Tensor> {
        let width = x.dim(D::Minus1)?;
        if width != self.order.len() {
            bail!("x: {width} columns, expected {}", self.order.len());
        }
        x.contiguous()?.index_select(&self.on_device, D::Minus1)
    }

    /// A matrix `[N, K]` with its columns back in the order of the input.
    pub(crate) fn restore(&self, matrix: &Tensor) -> Result<Tensor> {
        let mut inverse = vec![0u32; self.order.len()];
        for (column, input) in self.order.iter().enumerate() {
            inverse[*input as usize] = column as u32;
        }
        let inverse = Tensor::new(inverse, matrix.device())?;
        matrix.contiguous()?.index_select(&inverse, D::Minus1)
    }
}
