//! The program itself, which a signal ends.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use candle_fused_serve::args::Args;
use clap::Parser;
use common::shapes::Shape;

use crate::model;

#[tokio::test]
async fn sigterm_ends_it() {
    let model = model::save();
    let mut child = Command::new(env!("CARGO_BIN_EXE_candle-fused-serve"))
        .args(["--cpu", "--port", "0", "--grace", "86400", "--model"])
        .arg(model.path())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program");
    let lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let mut lines = lines.map_while(Result::ok);
    let listening = lines.find_map(|line| line.strip_prefix("listening on ").map(str::to_owned));
    let url = listening.expect("an address");
    // Kept by its client, which is still there when the program ends.
    let client = reqwest::Client::new();
    let response = client.get(format!("{url}/health")).send().await;
    let text = response.expect("a response").text().await;
    assert_eq!(text.expect("text"), "{\"status\":\"ok\"}");
    let kill = format!("kill -TERM {}", child.id());
    let sent = Command::new("sh").args(["-c", &kill]).status();
    assert!(sent.expect("a shell").success());
    assert_eq!(lines.collect::<Vec<_>>(), ["shutting down"]);
    assert!(child.wait().expect("an end").success());
}

#[test]
fn a_shape_stands_in_the_place_of_a_model() {
    let parse = |flags: &[&str]| {
        let all = ["candle-fused-serve", "--shape", "llama-3.2-1b"];
        Args::try_parse_from(all.iter().chain(flags))
    };
    assert_eq!(parse(&[]).expect("flags").shape, Some(Shape::Llama1b));
    assert!(parse(&["--model", "a.gguf"]).is_err() && parse(&["--mmap"]).is_err());
}
