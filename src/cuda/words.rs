//! Codes in words of 32 bits on their way to a GPU's layout: the host's side of `kernels/formats/unpack_words.cu`.

use super::abi::{FORMAT_THREADS, UnpackWordsParams};
use super::{Address, Grid, Launcher, Module, address_of, fatbin};
use crate::quant::words::{WordLayout, Words};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle_core::{CudaDevice, Device, Error, Result, Tensor, bail};

static MODULE: Module = Module::new("unpack_words", fatbin!("unpack_words"), &["unpack_words"]);

/// The words of a matrix on its device.
pub(super) struct WordsOnDevice<'a> {
    device: &'a CudaDevice,
    layout: WordLayout,
    /// One behind the other.
    words: Tensor,
    /// The column of the words that each column is, if they are not in order.
    order: Option<CudaSlice<u32>>,
    cols: usize,
}

impl<'a> WordsOnDevice<'a> {
    /// The words of a matrix, whose columns divide by 4. They are uploaded if they are not there yet.
    ///
    /// # Errors
    /// If a code has no word, `order` names no columns, or the device's memory does not suffice.
    pub fn new(
        words: &Words,
        order: Option<&[u32]>,
        (rows, cols): (usize, usize),
        device: &'a CudaDevice,
    ) -> Result<Self> {
        if !words.hold(rows, cols) {
            bail!(
                "codes: {} words given for {rows} x {cols}",
                words.words.elem_count()
            );
        }
        if let Some(order) = order
            && (order.len() != cols || order.iter().any(|k| *k as usize >= cols))
        {
            bail!("order: {} columns, expected each of {cols}", order.len());
        }
        Ok(Self {
            device,
            layout: words.layout,
            words: words.words.to_device(&Device::Cuda(device.clone()))?,
            order: order.map(|order| device.clone_htod(order)).transpose()?,
            cols,
        })
    }

    /// The codes of some rows of the matrix, a byte each; those of 8 bits less 128, unless they are signed.
    pub fn unpack(&self, first: usize, rows: usize) -> Result<CudaSlice<i8>> {
        let count = rows * self.cols;
        // SAFETY: the kernel writes all of it.
        let mut codes = unsafe { self.device.alloc::<i8>(count)? };
        let launcher = Launcher::new(self.device)?;
        // Four codes for a thread.
        let blocks = (count / 4).div_ceil(FORMAT_THREADS);
        let grid = Grid::line(
            u32::try_from(blocks).map_err(Error::wrap)?,
            FORMAT_THREADS as u32,
        );
        let layout = self.layout;
        let [row_log, col_log] = layout.logs();
        {
            let words = address_of(&self.words)?;
            if !words.is_multiple_of(size_of::<u32>() as Address) {
                bail!("codes: words at an address that 4 does not divide");
            }
            let stream = self.device.cuda_stream();
            let order = self.order.as_ref().map(|o| o.device_ptr(o.stream()));
            let (out, _out) = codes.device_ptr_mut(&stream);
            let params = UnpackWordsParams {
                words,
                order: order.as_ref().map_or(0 as Address, |(at, _)| *at),
                codes: out,
                rows: rows as u64,
                first: first as u64,
                row_step: layout.row_step as u64,
                col_step: layout.col_step as u64,
                k: self.cols as u32,
                row_log,
                col_log,
                fields: layout.fields,
                bits: layout.bits,
                flip: match layout.bits {
                    8 if !layout.signed => 0x80,
                    _ => 0,
                },
            };
            // SAFETY: the kernel takes `UnpackWordsParams`. Each of the rows and columns has a word, as `new` checked,
            // and the codes have room for the rows; all is freed in the order of the stream.
            unsafe { launcher.run(&MODULE, 0, grid, &params)? };
        }
        Ok(codes)
    }
}
