//! Every op against the candle operations that it replaces, on SmolLM2-135M's shapes.
//!
//! ```text
//! cargo bench                      # everything
//! cargo bench -- linear attention  # what contains one of these words
//! cargo bench --features cuda -- gpu
//! cargo bench --features cuda -- ternary
//! ```
//! Each contender's result is checked against the op's float64 `reference()` before it is timed.
//! Rounds of both sides alternate and medians are reported; the read bandwidth of the machine is
//! measured in the same run. Times are of a shared CPU: only the ratios mean something.

#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod quantized;
mod rows;
#[cfg(feature = "cuda")]
mod ternary;
mod timing;

use candle_core::Result;
use timing::{Row, compare, read_bandwidth};

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    let wanted = |name: &str| words.is_empty() || words.iter().any(|w| name.contains(w.as_str()));
    let bandwidth = read_bandwidth();
    println!(
        "{} threads, {}, {:.1} GB/s read\n",
        candle_fused::cpu::pool::threads(),
        candle_fused::cpu::simd::level().name(),
        bandwidth / 1e9
    );
    println!(
        "{:<44}{:>12}{:>12}{:>9}{:>9}{:>8}",
        "", "candle", "fused", "ratio", "GB/s", "of read"
    );
    for (stem, shapes) in rows::ALL {
        for shape in shapes {
            let name = format!("{stem} {shape}");
            if wanted(&name) {
                let row = rows::row(stem, shape)?;
                report(&name, row, bandwidth)?;
            }
        }
    }
    #[cfg(feature = "cuda")]
    gpu::report(wanted)?;
    #[cfg(feature = "cuda")]
    ternary::report(wanted)?;
    Ok(())
}

fn report(name: &str, row: Row, bandwidth: f64) -> Result<()> {
    let Row {
        mut plain,
        mut fused,
        check,
        bytes,
    } = row;
    check(&plain()?, &fused()?)?;
    let [candle, ours] = compare(&mut plain, &mut fused)?;
    let rate = bytes as f64 / ours;
    println!(
        "{name:<44}{:>9.1} us{:>9.1} us{:>8.2}x{:>9.1}{:>7.0}%",
        candle * 1e6,
        ours * 1e6,
        candle / ours,
        rate / 1e9,
        100. * rate / bandwidth
    );
    Ok(())
}
