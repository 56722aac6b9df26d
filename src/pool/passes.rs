//! Passes over many values, shared out among the threads of the pool.

use super::{for_ranges, for_rows};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Values that a task takes at least.
const GRAIN: usize = 1 << 16;

/// Values between two looks at whether to go on. They are taken without a branch, so that the loop vectorizes.
const STEP: usize = 1 << 10;

/// Whether `test` holds for all values.
pub(crate) fn all<T: Sync>(values: &[T], test: impl Fn(&T) -> bool + Sync) -> bool {
    let failed = AtomicBool::new(false);
    for_ranges(values.len(), GRAIN, |range| {
        for some in values[range].chunks(STEP) {
            if failed.load(Ordering::Relaxed) {
                return;
            }
            if !some.iter().fold(true, |all, value| all & test(value)) {
                failed.store(true, Ordering::Relaxed);
            }
        }
    });
    !failed.into_inner()
}

/// The place of the first value for which `test` does not hold. One thread looks for it, where there is one.
pub(crate) fn first_without<T: Sync>(
    values: &[T],
    test: impl Fn(&T) -> bool + Sync,
) -> Option<usize> {
    match all(values, &test) {
        true => None,
        false => values.iter().position(|value| !test(value)),
    }
}

/// What `change` makes of each value.
pub(crate) fn map<T: Sync, U: Send + Clone + Default>(
    values: &[T],
    change: impl Fn(&T) -> U + Sync,
) -> Vec<U> {
    let mut changed = vec![U::default(); values.len()];
    for_rows(&mut changed, 1, GRAIN, |first, part| {
        for (to, value) in part.iter_mut().zip(&values[first..]) {
            *to = change(value);
        }
    });
    changed
}

/// As [`for_rows`], of what may fail.
///
/// # Errors
/// One of those of `body`, if there are any.
pub(crate) fn try_for_rows<T: Send, E: Send>(
    out: &mut [T],
    width: usize,
    grain: usize,
    body: impl Fn(usize, &mut [T]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let failed = Mutex::new(None);
    for_rows(out, width, grain, |first, rows| {
        if let Err(e) = body(first, rows) {
            // Poisoned or not: it holds a value that has been stored as a whole.
            *failed.lock().unwrap_or_else(|e| e.into_inner()) = Some(e);
        }
    });
    match failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some(e) => Err(e),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{GRAIN, all, first_without, map, try_for_rows};

    #[test]
    fn an_error_comes_back() {
        let mut out = vec![0; 3 * GRAIN];
        let odd = |first: usize, rows: &mut [i32]| {
            rows.fill(1);
            if first == 0 { Ok(()) } else { Err(first) }
        };
        assert_eq!(try_for_rows(&mut out[..GRAIN], 1, GRAIN, odd), Ok(()));
        assert!(out[..GRAIN].iter().all(|v| *v == 1));
        let error = try_for_rows(&mut out, 1, GRAIN, odd);
        assert!(error == Err(GRAIN) || error == Err(2 * GRAIN), "{error:?}");
    }

    #[test]
    fn every_value_is_taken() {
        let values: Vec<usize> = (0..3 * GRAIN + 5).collect();
        assert!(
            map(&values, |v| v + 1)
                .iter()
                .copied()
                .eq(1..values.len() + 1)
        );
        for at in [0, GRAIN - 1, GRAIN, values.len() - 1] {
            assert!(!all(&values, |v| *v != at));
            assert_eq!(first_without(&values, |v| *v < at), Some(at));
        }
        assert!(all(&values, |v| *v < values.len()));
        assert_eq!(first_without(&values, |v| *v < values.len()), None);
        assert!(all::<u8>(&[], |_| false) && map::<u8, u8>(&[], |v| *v).is_empty());
    }
}
