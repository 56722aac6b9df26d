use std::time::Duration;

use anyhow::{Context, anyhow};

use crate::common::report::{
    OutputClosed, Table, bytes, one_line, peak_memory, rate, seconds, write_text,
};

#[test]
fn units_keep_three_digits() {
    let time = |s: f64| seconds(Duration::from_secs_f64(s));
    assert_eq!(
        [time(5e-5), time(0.00456), time(0.0456), time(0.456)],
        ["50 µs", "4.56 ms", "45.6 ms", "456 ms"]
    );
    assert_eq!(
        [time(4.561), time(45.61), time(456.1)],
        ["4.56 s", "45.6 s", "456 s"]
    );
    assert_eq!(
        [bytes(12), bytes(98_362_432), bytes(2_500_000_000)],
        ["12 B", "98 MB", "2.50 GB"]
    );
    assert_eq!(rate(50, Duration::from_secs(2)), "25.0 tok/s");
    assert_eq!(rate(5000, Duration::from_secs(2)), "2500 tok/s");
    assert_eq!(
        [rate(0, Duration::from_secs(1)), rate(1, Duration::ZERO)],
        ["n/a", "n/a"]
    );
}

#[test]
fn tables_are_aligned() {
    let mut table = Table::default();
    table
        .row("load", "1.23 s", "")
        .row("decode", "29.6 tok/s", "99 tokens");
    assert_eq!(
        table.to_string(),
        "load        1.23 s\ndecode  29.6 tok/s  99 tokens"
    );
}

#[test]
fn errors_are_one_line_and_say_nothing_twice() {
    let error = Err::<(), _>(anyhow!("the\n  cause"))
        .context("what: the cause")
        .context("where")
        .unwrap_err();
    assert_eq!(one_line(&error), "where: what: the cause");
    let error = Err::<(), _>(anyhow!("no space\nleft"))
        .context("cannot write x")
        .unwrap_err();
    assert_eq!(one_line(&error), "cannot write x: no space left");
}

#[test]
#[cfg(target_os = "linux")]
fn peak_memory_is_that_of_this_process() {
    let before = peak_memory().unwrap();
    let block = vec![1u8; 64 << 20];
    assert!(
        std::hint::black_box(&block)
            .iter()
            .step_by(4096)
            .all(|byte| *byte == 1)
    );
    assert!(peak_memory().unwrap() >= before.max(64 << 20));
}

#[test]
fn closed_output_is_told_from_other_failures() {
    struct Broken(std::io::ErrorKind);
    impl std::io::Write for Broken {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    assert!(
        write_text(&mut Broken(std::io::ErrorKind::BrokenPipe), "x")
            .unwrap_err()
            .is::<OutputClosed>()
    );
    let full = write_text(&mut Broken(std::io::ErrorKind::StorageFull), "x").unwrap_err();
    assert!(!full.is::<OutputClosed>() && one_line(&full).contains("standard output"));
}
