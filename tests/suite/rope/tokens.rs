//! Tokens that have a position each.

use super::{STYLES, limit, tables};
use crate::support::{devices, randn, randn_on, values, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::rope::{
    RopeStyle, RotaryTables, Rotation, reference_tokens, rope, rope_tokens,
};
use candle_fused::trace;

const POSITIONS: [u32; 5] = [7, 0, 39, 39, 3];

/// The same positions in each type that they may have.
fn positions(device: &Device) -> Result<[Tensor; 3]> {
    Ok([
        Tensor::new(&POSITIONS, device)?,
        Tensor::new(&POSITIONS.map(|p| p as i32), device)?,
        Tensor::new(&POSITIONS.map(i64::from), device)?,
    ])
}

#[test]
fn tokens_are_rotated_by_their_own_positions() -> Result<()> {
    let types = [DType::F32, DType::F16, DType::BF16];
    for device in devices() {
        for dtype in types {
            for style in STYLES {
                for (heads, head_dim, pairs) in
                    [(3, 64, 32), (1, 80, 10), (2, 96, 48), (2, 7, 2), (1, 16, 0)]
                {
                    let x = randn_on(&[5, heads, head_dim], dtype, &device)?;
                    let (cos, sin) = tables(40, pairs, DType::F32, &device)?;
                    let tables = RotaryTables {
                        cos: &cos,
                        sin: &sin,
                        style,
                    };
                    for positions in positions(&device)? {
                        let run = || rope_tokens(&x, &positions, &tables);
                        let (got, calls) = trace::capture(run);
                        let got = got?;
                        assert_eq!(calls.count("rope"), 1);
                        assert_eq!((got.dims(), got.dtype()), (x.dims(), dtype));
                        let expected = reference_tokens(&x, &positions, &tables)?;
                        let error = widest_error(&got, &expected)?;
                        assert!(
                            error < limit(dtype),
                            "{device:?} {dtype:?} {positions:?} {style:?} {head_dim}: {error:e}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

/// Tokens of one sequence in order are what `rope` turns, to the bit, in any layout of x and type of tables.
#[test]
fn one_sequence_is_what_rope_gives() -> Result<()> {
    for device in devices() {
        for table in [DType::F32, DType::F16, DType::BF16] {
            let heads = randn_on(&[1, 3, 6, 40], DType::F32, &device)?;
            let (cos, sin) = tables(12, 20, table, &device)?;
            let style = RopeStyle::HalfSplit;
            let rotation = Rotation {
                cos: &cos,
                sin: &sin,
                position: 4,
                style,
            };
            let expected = rope(&heads, &rotation)?.squeeze(0)?.transpose(0, 1)?;
            let positions = Tensor::arange(4u32, 10, &device)?;
            let tables = RotaryTables {
                cos: &cos,
                sin: &sin,
                style,
            };
            let x = heads.squeeze(0)?.transpose(0, 1)?;
            for x in [x.clone(), x.contiguous()?] {
                let got = rope_tokens(&x, &positions, &tables)?;
                assert_eq!(values(&got)?, values(&expected)?);
            }
            // A view of which the values of a head do not lie side by side.
            let strided = x.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
            let got = rope_tokens(&strided, &positions, &tables)?;
            assert_eq!(values(&got)?, values(&expected)?);
            assert_eq!(
                rope_tokens(&x.narrow(0, 0, 0)?, &positions.narrow(0, 0, 0)?, &tables)?.dims(),
                [0, 3, 40]
            );
        }
    }
    Ok(())
}

/// An error on the CPU; zeros on a GPU, where the host does not know.
#[test]
fn positions_past_the_tables_are_not_read() -> Result<()> {
    for device in devices() {
        let x = randn_on(&[2, 3, 16], DType::F32, &device)?;
        let (cos, sin) = tables(8, 8, DType::F32, &device)?;
        let tables = RotaryTables {
            cos: &cos,
            sin: &sin,
            style: RopeStyle::Interleaved,
        };
        for (bad, position) in [
            (Tensor::new(&[5u32, 8], &device)?, "8"),
            (Tensor::new(&[5i32, -1], &device)?, "-1"),
            (Tensor::new(&[5i64, -1], &device)?, "-1"),
            // Its low 32 bits are a position that is there.
            (Tensor::new(&[5i64, (1 << 32) + 2], &device)?, "4294967298"),
        ] {
            let got = rope_tokens(&x, &bad, &tables);
            if device.is_cpu() {
                let error = got.expect_err("").to_string();
                let said = format!("positions[1] is {position}, cos has 8 positions");
                assert!(error.contains(&said), "{error}");
                continue;
            }
            let (got, fine) = (got?, Tensor::new(&[5u32, 5], &device)?);
            let expected = rope_tokens(&x, &fine, &tables)?;
            assert_eq!(values(&got.get(0)?)?, values(&expected.get(0)?)?);
            assert_eq!(values(&got.get(1)?)?, [0.; 48]);
        }
    }
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let x = randn(&[5, 2, 8], DType::F32)?;
    let (cos, sin) = tables(6, 4, DType::F32, &Device::Cpu)?;
    let tables = RotaryTables {
        cos: &cos,
        sin: &sin,
        style: RopeStyle::HalfSplit,
    };
    let at = Tensor::zeros(5, DType::U32, &Device::Cpu)?;
    let message = |x: &Tensor, at: &Tensor, tables: &RotaryTables<'_>| {
        rope_tokens(x, at, tables).expect_err("").to_string()
    };
    let said = message(&x.unsqueeze(0)?, &at, &tables);
    assert!(
        said.contains("x has shape [1, 5, 2, 8], expected [N, H, D]"),
        "{said}"
    );
    let said = message(&x, &at.narrow(0, 0, 4)?, &tables);
    assert!(
        said.contains("positions has shape [4], expected [N] = [5]"),
        "{said}"
    );
    let said = message(&x, &at.to_dtype(DType::F32)?, &tables);
    assert!(
        said.contains("positions is F32, expected u32, i32 or i64"),
        "{said}"
    );
    let apart = Tensor::zeros((5, 2), DType::U32, &Device::Cpu)?
        .narrow(1, 0, 1)?
        .squeeze(1)?;
    let said = message(&x, &apart, &tables);
    assert!(
        said.contains("positions have to lie side by side"),
        "{said}"
    );
    let wide = randn(&[6, 5], DType::F32)?;
    let said = message(
        &x,
        &at,
        &RotaryTables {
            cos: &wide,
            sin: &wide,
            ..tables
        },
    );
    assert!(
        said.contains("cos rotates 10 dimensions, a head has 8"),
        "{said}"
    );
    let said = message(
        &x,
        &at,
        &RotaryTables {
            sin: &wide,
            ..tables
        },
    );
    assert!(said.contains("rope_tokens: sin has shape"), "{said}");
    Ok(())
}
