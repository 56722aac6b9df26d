//! Matrices that are still in a file, in the words of a checkpoint, or written row by row.

use super::blocks::cuda_device;
use super::packed::PackedLayout;
use super::{BlockMatrix, address_of, upload_from};
use crate::quant::words::Words;
use crate::quant::{BlockFormat, Codes};
use candle_core::quantized::GgmlDType;
use candle_core::{Device, Result, bail};
use std::io::Read;

impl BlockMatrix {
    /// [`Self::new`] of blocks that are the next bytes of a file.
    ///
    /// # Errors
    /// As there, or if the file ends before.
    pub(crate) fn read(
        dtype: GgmlDType,
        (rows, cols): (usize, usize),
        reader: &mut impl Read,
        device: &Device,
    ) -> Result<Self> {
        let format = BlockFormat::of(dtype)?;
        let Some(bytes) = format.row_bytes(cols)?.checked_mul(rows) else {
            bail!("rows: {rows} rows of {cols} values are too many");
        };
        let raw = upload_from(reader, bytes, cuda_device(device)?)?;
        // SAFETY: the bytes are those of the matrix, and are freed in the order of the stream.
        unsafe { Self::repack(format, rows, cols, address_of(&raw)?, device) }
    }

    /// [`Self::from_codes`] of codes of 4 or 8 bits that are still in words, which the GPU unpacks: `codes` has none. No NaN
    /// is among those of FP8. The
    /// second of `words` names the column of the words that each column is, if they are not in order. Beside the matrix
    /// all of its words are in the device's memory meanwhile.
    ///
    /// # Errors
    /// As there, or if a code has no word, or an e4m3 scale of NVFP4 is 0.
    pub(crate) fn from_words(
        codes: &Codes,
        words: (&Words, Option<&[u32]>),
        device: &Device,
    ) -> Result<Self> {
        let layout = PackedLayout::new(codes.scheme, codes.rows, codes.cols)?;
        let data = layout.upload_words(codes, words, cuda_device(device)?)?;
        Self::of_codes(codes, layout, data, device)
    }

    /// [`Self::from_codes`] of codes that `read` writes row by row, from a row on: `codes` has none.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn from_rows(
        codes: &Codes,
        read: impl Fn(usize, &mut [i8]) + Sync,
        device: &Device,
    ) -> Result<Self> {
        let layout = PackedLayout::new(codes.scheme, codes.rows, codes.cols)?;
        let data = layout.upload_rows(codes, read, cuda_device(device)?)?;
        Self::of_codes(codes, layout, data, device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::holds_nan;
    use crate::quant::Scheme;
    use crate::quant::words::{IN_ORDER, UPPER_FIRST, WordLayout};
    use candle_core::{DType, Tensor};
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    /// Codes `[rows, cols]` in words of a layout.
    fn packed(codes: &[u8], (rows, cols): (usize, usize), layout: WordLayout) -> Result<Words> {
        let mut words = vec![0i32; layout.place(rows - 1, cols - 1).0 + 1];
        for (at, code) in codes.iter().enumerate() {
            let (word, shift) = layout.place(at / cols, at % cols);
            words[word] |= (u32::from(*code) << shift) as i32;
        }
        let words = Tensor::new(words, &Device::Cpu)?;
        Ok(Words { words, layout })
    }

    /// What a GPU makes of words is what it makes of a byte for each code.
    fn check(
        device: &Device,
        (rows, cols): (usize, usize),
        layout: WordLayout,
        sorted: bool,
    ) -> Result<()> {
        let mut rng = StdRng::seed_from_u64((rows + cols) as u64);
        let eight = layout.bits == 8;
        let raw: Vec<u8> = (0..rows * cols)
            .map(|_| rng.random::<u8>() & ((1u16 << layout.bits) - 1) as u8)
            .collect();
        let on_host = packed(&raw, (rows, cols), layout)?;
        let on_device = Words {
            words: on_host.words.to_device(device)?,
            layout,
        };
        let order: Vec<u32> = match sorted {
            true => (0..cols as u32).rev().collect(),
            false => (0..cols as u32).collect(),
        };
        let flip = if eight { 0x80 } else { 0 };
        let code = |at: usize| raw[at / cols * cols + order[at % cols] as usize] ^ flip;
        let scheme = match eight {
            true => Scheme::Int8,
            false => Scheme::Int4 {
                group: 32,
                zero_point: false,
            },
        };
        let scales = scheme.scale_count(rows, cols);
        let shell = Codes {
            scheme,
            rows,
            cols,
            codes: Vec::new(),
            scales: (0..scales).map(|i| 1. + (i % 7) as f32).collect(),
            zeros: Vec::new(),
            group_scales: Vec::new(),
        };
        let codes = Codes {
            codes: (0..rows * cols).map(|at| code(at) as i8).collect(),
            ..shell.clone()
        };
        let order = sorted.then_some(order.as_slice());
        let expected = BlockMatrix::from_codes(&codes, device)?.dequantize(DType::F32)?;
        for words in [on_host, on_device] {
            let ours = BlockMatrix::from_words(&shell, (&words, order), device)?;
            let differ = ours.dequantize(DType::F32)?.ne(&expected)?;
            assert_eq!(
                differ.to_dtype(DType::F32)?.max_all()?.to_scalar::<f32>()?,
                0.,
                "{rows} x {cols}, {layout:?}, sorted: {sorted}"
            );
        }
        Ok(())
    }

    #[test]
    fn a_gpu_unpacks_words_as_the_host_does() -> Result<()> {
        let Ok(device) = Device::new_cuda(0) else {
            return Ok(());
        };
        let columns = |bits, rows| WordLayout {
            bits,
            of_rows: false,
            row_step: 1,
            col_step: rows,
            fields: IN_ORDER,
            signed: false,
        };
        for sorted in [false, true] {
            // GPTQ, AWQ, and rows one behind the other, whose last word is not full.
            check(&device, (24, 160), columns(4, 24), sorted)?;
            check(&device, (13, 132), columns(8, 13), sorted)?;
            let awq = WordLayout {
                bits: 4,
                of_rows: true,
                row_step: 1,
                col_step: 5,
                fields: 0x7362_5140,
                signed: false,
            };
            check(&device, (40, 96), awq, sorted)?;
            let rows = WordLayout {
                bits: 8,
                of_rows: false,
                row_step: 9,
                col_step: 1,
                fields: IN_ORDER,
                signed: false,
            };
            check(&device, (21, 36), rows, sorted)?;
        }
        // More codes than are unpacked at a time.
        check(&device, (8200, 4104), columns(8, 8200), false)
    }

    /// Bytes of checkpoints, unpacked on the GPU, are what codes are.
    #[test]
    fn bytes_of_each_format_are_unpacked() -> Result<()> {
        let Ok(device) = Device::new_cuda(0) else {
            return Ok(());
        };
        let mut rng = StdRng::seed_from_u64(7);
        // The second has more codes than are unpacked at a time.
        for (rows, cols) in [(13, 320), (4100, 8256)] {
            for scheme in ["int8", "fp8", "fp8-block128", "nf4", "nvfp4"] {
                let scheme: Scheme = scheme.parse()?;
                let (low, high) = scheme.code_range();
                let code = |rng: &mut StdRng| match rng.random_range(low..=high) {
                    // The NaNs of e4m3.
                    127 | -1 if scheme.is_fp8() => 0,
                    code => code,
                };
                let shell = Codes {
                    scheme,
                    rows,
                    cols,
                    codes: Vec::new(),
                    scales: vec![0.5; scheme.scale_count(rows, cols)],
                    zeros: Vec::new(),
                    group_scales: vec![0x38; scheme.group_scale_count(rows, cols)],
                };
                let codes: Vec<i8> = (0..rows * cols).map(|_| code(&mut rng)).collect();
                let (bits, fields) = match scheme {
                    Scheme::Nf4 => (4, UPPER_FIRST),
                    Scheme::Nvfp4 => (4, IN_ORDER),
                    _ => (8, IN_ORDER),
                };
                let two = |pair: &[i8]| match fields {
                    UPPER_FIRST => (pair[0] << 4 | pair[1]) as u8,
                    _ => (pair[1] << 4 | pair[0]) as u8,
                };
                let bytes: Vec<u8> = match bits {
                    4 => codes.chunks_exact(2).map(two).collect(),
                    _ => codes.iter().map(|code| *code as u8).collect(),
                };
                let layout = WordLayout {
                    signed: bits == 8,
                    ..WordLayout::of_rows(bits, cols, fields).expect("whole words")
                };
                let words = Words {
                    words: Tensor::new(bytes, &device)?,
                    layout,
                };
                let ours = BlockMatrix::from_words(&shell, (&words, None), &device)?;
                let theirs = BlockMatrix::from_codes(&Codes { codes, ..shell }, &device)?;
                let values = |of: &BlockMatrix| of.dequantize(DType::F32)?.flatten_all();
                let (ours, theirs) = (values(&ours)?, values(&theirs)?);
                assert!(
                    ours.to_vec1::<f32>()? == theirs.to_vec1::<f32>()?,
                    "{scheme}, {rows} x {cols}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn a_nan_is_found_wherever_it_is() -> Result<()> {
        let Ok(device) = Device::new_cuda(0) else {
            return Ok(());
        };
        for count in [1, 16, 4099] {
            let clean = vec![0x7e_u8; count];
            assert!(!holds_nan(&Tensor::new(clean.as_slice(), &device)?)?);
            for (at, nan) in [(0, 0x7f), (count / 2, 0xff), (count - 1, 0x7f)] {
                let mut floats = clean.clone();
                floats[at] = nan;
                assert!(
                    holds_nan(&Tensor::new(floats, &device)?)?,
                    "{at} of {count}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn words_that_are_not_there_are_refused() -> Result<()> {
        let Ok(device) = Device::new_cuda(0) else {
            return Ok(());
        };
        let layout = WordLayout {
            bits: 8,
            of_rows: false,
            row_step: 1,
            col_step: 8,
            fields: IN_ORDER,
            signed: false,
        };
        let shell = Codes {
            scheme: Scheme::Int8,
            rows: 8,
            cols: 32,
            codes: Vec::new(),
            scales: vec![1.; 8],
            zeros: Vec::new(),
            group_scales: Vec::new(),
        };
        let said = |count: usize, order: Option<&[u32]>| -> Result<String> {
            let words = Words {
                words: Tensor::new(vec![0i32; count], &Device::Cpu)?,
                layout,
            };
            let refused = BlockMatrix::from_words(&shell, (&words, order), &device);
            Ok(refused.err().map(|e| e.to_string()).unwrap_or_default())
        };
        assert!(said(63, None)?.contains("63 words given for 8 x 32"));
        assert!(said(64, Some(&[32; 32]))?.contains("order: 32 columns"));
        assert_eq!(said(64, None)?, "");
        Ok(())
    }
}
