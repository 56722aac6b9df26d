use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use crate::common::comparison::{
    CompareReport, JsonFile, LayerError, Probe, Round, Side, Speedup, median, percentile,
};
use crate::common::report::one_line;

fn side(ms: f64, memory: Option<u64>) -> Side {
    let step = Duration::from_secs_f64(ms / 1e3);
    let round = Round {
        first_token: step * 10,
        prefill: step * 9,
        steps: vec![step; 63],
    };
    Side::of_rounds(
        Duration::from_secs(1),
        36,
        &[round.clone(), round.clone(), round],
        Probe {
            peak_rss: memory,
            ..Default::default()
        },
    )
}

fn report() -> CompareReport {
    let (stock, fused) = (side(32.0, Some(250_000_000)), side(8.0, Some(200_000_000)));
    CompareReport {
        model: "tiny".into(),
        baseline: "stock".into(),
        device: "cpu".into(),
        dtype: "q4_1".into(),
        threads: 2,
        prompt_tokens: 36,
        sample_len: 64,
        tokens_match: false,
        first_mismatch: Some(17),
        mismatch_margin: Some(0.0012),
        max_logit_diff: 0.5,
        layers: vec![LayerError {
            layer: 0,
            max_abs: 1e-6,
            rel: 2e-7,
        }],
        op_calls: BTreeMap::from([("rope".into(), 30)]),
        speedup: Speedup::of(&stock, &fused),
        stock,
        settings: None,
        fused,
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * b.abs()
}

#[test]
fn medians_and_percentiles() {
    assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    assert!(median(vec![]).is_nan() && percentile(vec![], 50.0).is_nan());
    let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
    for (percent, wanted) in [
        (0.0, 1.0),
        (1.0, 1.0),
        (50.0, 50.0),
        (99.0, 99.0),
        (100.0, 100.0),
    ] {
        assert_eq!(percentile(hundred.clone(), percent), wanted);
    }
    assert_eq!(percentile(vec![7.0], 99.0), 7.0);
}

#[test]
fn a_side_is_the_median_of_its_rounds() {
    let round = |ms: u64| Round {
        first_token: Duration::from_millis(10 * ms),
        prefill: Duration::from_millis(9 * ms),
        steps: vec![Duration::from_millis(ms); 20],
    };
    let side = Side::of_rounds(
        Duration::from_millis(500),
        90,
        &[round(100), round(1), round(10)],
        Probe::default(),
    );
    assert!(
        close(side.load_s, 0.5) && close(side.ttft_ms, 100.0) && close(side.prefill_tok_s, 1000.0)
    );
    assert!(
        close(side.decode_tok_s, 100.0)
            && close(side.tpot_ms_p50, 10.0)
            && close(side.tpot_ms_p99, 10.0)
    );
    assert_eq!(side.peak_rss_mb, None);
    let speedup = report().speedup;
    assert!(close(speedup.ttft, 4.0) && close(speedup.prefill, 4.0) && close(speedup.decode, 4.0));
}

#[test]
fn the_json_has_the_promised_names() {
    let json = serde_json::to_value(report()).unwrap();
    let names =
        |value: &Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    let mut all = names(&json);
    all.sort();
    let mut wanted = [
        "model",
        "baseline",
        "device",
        "dtype",
        "threads",
        "prompt_tokens",
        "sample_len",
        "tokens_match",
        "first_mismatch",
        "mismatch_margin",
        "max_logit_diff",
        "layers",
        "op_calls",
        "stock",
        "settings",
        "fused",
        "speedup",
    ];
    wanted.sort();
    assert_eq!(all, wanted);
    let mut of_side = [
        "load_s",
        "ttft_ms",
        "prefill_tok_s",
        "decode_tok_s",
        "tpot_ms_p50",
        "tpot_ms_p99",
        "peak_rss_mb",
        "gpu_memory_mb",
        "launches_per_token",
    ];
    of_side.sort();
    for side in ["stock", "fused"] {
        let mut all = names(&json[side]);
        all.sort();
        assert_eq!(all, of_side);
    }
    assert_eq!(json["layers"][0]["layer"], 0);
    assert_eq!(json["op_calls"]["rope"], 30);
    assert!(json["speedup"]["decode"].is_number());
}

#[test]
fn the_text_says_where_tokens_differ() {
    let mut report = report();
    let text = report.to_string();
    assert!(
        text.contains("differ from token 17 on") && text.contains("1.20e-3"),
        "{text}"
    );
    assert!(text.contains("rope 30") && text.contains("4.00x"), "{text}");
    assert!(
        !text.contains("settings only") && !text.contains("kernels per token"),
        "{text}"
    );
    report.settings = Some(side(30.0, None));
    report.fused.launches_per_token = Some(153);
    let text = report.to_string();
    assert!(
        text.contains("settings only") && text.contains("kernels per token"),
        "{text}"
    );
    report.tokens_match = true;
    report.stock.peak_rss_mb = None;
    let text = report.to_string();
    assert!(text.contains("all equal") && text.contains("n/a"), "{text}");
}

#[test]
fn the_file_appears_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.json");
    let file = JsonFile::create(&path).unwrap();
    assert!(!path.exists());
    file.write(&report()).unwrap();
    let read = std::fs::read_to_string(&path).unwrap();
    assert_eq!(
        read,
        serde_json::to_string_pretty(&report()).unwrap() + "\n"
    );
    let read: CompareReport = serde_json::from_str(&read).unwrap();
    assert_eq!((read.model, read.layers), (report().model, report().layers));
    JsonFile::create(&path).unwrap().write(&report()).unwrap();
    drop(JsonFile::create(&path).unwrap());
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        1,
        "temporary files stay behind"
    );
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        assert_ne!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o044,
            0,
            "only the owner can read it"
        );
    }
}

#[test]
fn paths_that_cannot_be_written_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let said = |path: &std::path::Path| one_line(&JsonFile::create(path).unwrap_err());
    assert!(said(folder.path()).contains("is a folder"));
    let missing = said(&folder.path().join("missing/out.json"));
    assert!(
        missing.contains("cannot write") && missing.matches(".tmp").count() <= 1,
        "{missing}"
    );
}

#[test]
#[cfg(unix)]
fn devices_and_links_are_not_replaced() {
    JsonFile::create(std::path::Path::new("/dev/null"))
        .unwrap()
        .write(&report())
        .unwrap();
    use std::os::unix::fs::FileTypeExt;
    assert!(
        std::fs::metadata("/dev/null")
            .unwrap()
            .file_type()
            .is_char_device()
    );

    let folder = tempfile::tempdir().unwrap();
    let (target, link) = (folder.path().join("target"), folder.path().join("link"));
    std::fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    JsonFile::create(&link).unwrap().write(&report()).unwrap();
    assert!(link.is_symlink());
    assert!(std::fs::read_to_string(&target).unwrap().starts_with('{'));
}
