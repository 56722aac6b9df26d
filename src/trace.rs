//! Which fused ops ran, through which path, and how often.
//!
//! Off by default; while it is off an op pays one thread-local read. Recording is per thread: ops
//! are dispatched on the thread that calls them, so two models on two threads do not mix.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! let x = Tensor::ones((2, 8), candle_core::DType::F32, &Device::Cpu)?;
//! let (y, calls) = candle_fused::trace::capture(|| candle_fused::ops::residual_add(&x, &[&x]));
//! y?;
//! assert_eq!(calls.count("residual_add"), 1);
//! // One line for each kind of call, as `residual_add  1  cpu avx2 f32`.
//! println!("{calls}");
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! An op that takes a slower path says why after a colon: `cuda scalar f16: rows not aligned to
//! 16 bytes`. What is not in the list was not fused: candle's own operations are not
//! recorded.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

/// One kind of call: the op and how it was carried out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Call {
    /// The op's stem, as in `rms_norm_linear`.
    pub op: &'static str,
    /// Device, instruction set or kernel, dtypes and what was fused in, as in `cpu avx2 q4_1 +swiglu`;
    /// after a colon, why a slower path was taken.
    pub path: String,
}

/// The calls recorded on this thread during [`capture`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::{ops, trace};
/// let x = Tensor::ones(8, DType::F32, &Device::Cpu)?;
/// let (y, calls) = trace::capture(|| ops::residual_add(&x, &[&x]));
/// y?;
/// assert_eq!((calls.count("residual_add"), calls.by_op()["residual_add"]), (1, 1));
/// assert!(calls.iter().all(|(call, n)| call.path.starts_with("cpu") && n == 1));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Calls {
    counts: BTreeMap<Call, u64>,
}

impl Calls {
    /// How often `op` ran, over all its paths.
    pub fn count(&self, op: &str) -> u64 {
        self.counts
            .iter()
            .filter(|(c, _)| c.op == op)
            .map(|(_, n)| n)
            .sum()
    }

    /// Every kind of call with its count, ordered by op and path.
    pub fn iter(&self) -> impl Iterator<Item = (&Call, u64)> {
        self.counts.iter().map(|(c, n)| (c, *n))
    }

    /// The count of each op, over all its paths.
    pub fn by_op(&self) -> BTreeMap<&'static str, u64> {
        let mut ops = BTreeMap::new();
        for (call, n) in &self.counts {
            *ops.entry(call.op).or_default() += n;
        }
        ops
    }
}

/// A line for each kind of call: op, count, path.
impl fmt::Display for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ops = self.counts.keys().map(|call| call.op.len()).max();
        let numbers = self.counts.values().map(|n| n.to_string().len()).max();
        let (ops, numbers) = (ops.unwrap_or(0), numbers.unwrap_or(0));
        if self.counts.is_empty() {
            return f.write_str("no fused calls");
        }
        for (i, (call, n)) in self.counts.iter().enumerate() {
            let end = if i == 0 { "" } else { "\n" };
            write!(f, "{end}{:<ops$}  {n:>numbers$}  {}", call.op, call.path)?;
        }
        Ok(())
    }
}

thread_local! {
    static CALLS: RefCell<Option<Calls>> = const { RefCell::new(None) };
}

/// Runs `body` and returns what it returns, with the calls that this thread made meanwhile.
///
/// ```
/// let (four, calls) = candle_fused::trace::capture(|| 2 + 2);
/// assert_eq!((four, calls.count("linear")), (4, 0));
/// ```
pub fn capture<T>(body: impl FnOnce() -> T) -> (T, Calls) {
    /// Puts back what is captured around this, also where the body panics.
    struct Outer(Option<Calls>);
    impl Drop for Outer {
        fn drop(&mut self) {
            CALLS.set(self.0.take());
        }
    }
    let _outer = Outer(CALLS.replace(Some(Calls::default())));
    let result = body();
    (result, CALLS.take().unwrap_or_default())
}

/// Counts a call of `op`; `path` is only built while calls are captured.
pub(crate) fn record(op: &'static str, path: impl FnOnce() -> String) {
    CALLS.with_borrow_mut(|calls| {
        if let Some(calls) = calls {
            *calls.counts.entry(Call { op, path: path() }).or_default() += 1;
        }
    });
}
