use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::hub_server::{Answer, COMMIT, Hub as Server, LISTING};
use super::tiny;
use crate::common::hub::{Hub, HubOptions};
use crate::common::report::one_line;
use crate::common::source::{ModelFiles, SafetensorsFiles};

const ID: &str = "tests/tiny";

fn options(endpoint: &str, cache: &Path) -> HubOptions {
    HubOptions {
        endpoint: Some(endpoint.to_owned()),
        cache: Some(cache.to_owned()),
        answer_within: Duration::from_millis(1500),
        stalled_after: Duration::from_millis(700),
    }
}

fn serve() -> Server {
    Server::serve(
        ID,
        tiny::files()
            .unwrap()
            .into_iter()
            .map(|(name, bytes)| (name, Answer::File(bytes))),
    )
}

fn bytes_of(wanted: &str) -> Vec<u8> {
    tiny::files()
        .unwrap()
        .into_iter()
        .find(|(name, _)| *name == wanted)
        .unwrap()
        .1
}

fn safetensors(files: ModelFiles) -> SafetensorsFiles {
    match files {
        ModelFiles::Safetensors(files) => files,
        other => panic!("the hub gives safetensors, not {other:?}"),
    }
}

fn assert_whole(files: ModelFiles) {
    let files = safetensors(files);
    let read = |path: &PathBuf| std::fs::read(path).unwrap();
    assert_eq!(read(&files.config), bytes_of("config.json"));
    assert_eq!(
        read(files.tokenizer.as_ref().unwrap()),
        bytes_of("tokenizer.json")
    );
    assert_eq!(files.weights.len(), 1);
    assert!(
        read(&files.weights[0]) == bytes_of("model.safetensors"),
        "other weights than were served"
    );
}

fn error(hub: &Hub, revision: Option<&str>) -> String {
    one_line(&hub.fetch(ID, revision).unwrap_err())
}

/// Nothing in the cache may be taken for the model.
fn assert_not_cached(hub: &Hub) {
    assert!(hub.cached(ID, None).is_none());
}

#[test]
fn fetches_a_model_and_finds_it_again_without_the_hub() {
    let cache = tempfile::tempdir().unwrap();
    let server = serve();
    server.set(
        "model.safetensors",
        Answer::Elsewhere(bytes_of("model.safetensors")),
    );
    let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
    assert_not_cached(&hub);
    let files = hub.fetch(ID, None).unwrap();
    assert!(safetensors(files.clone()).tokenizer_config.is_some());
    assert_eq!(safetensors(files.clone()).generation_config, None);
    assert_whole(files.clone());
    drop(server);
    assert_eq!(hub.cached(ID, None).unwrap(), files);
    assert_eq!(hub.cached(ID, Some(COMMIT)).unwrap(), files);
    assert!(hub.cached(ID, Some("other")).is_none());
}

#[test]
fn fetches_sharded_weights() {
    let cache = tempfile::tempdir().unwrap();
    let server = serve();
    server.set("model.safetensors", Answer::Status(404, "EntryNotFound"));
    let index = r#"{"weight_map": {"a": "part-2.safetensors", "b": "part-1.safetensors", "c": "part-2.safetensors"}}"#;
    server.set("model.safetensors.index.json", Answer::File(index.into()));
    for part in ["part-1.safetensors", "part-2.safetensors"] {
        server.set(part, Answer::File(bytes_of("model.safetensors")));
    }
    let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
    let files = safetensors(hub.fetch(ID, Some(COMMIT)).unwrap());
    let names: Vec<_> = files
        .weights
        .iter()
        .map(|path| path.file_name().unwrap().to_str().unwrap())
        .collect();
    assert_eq!(names, ["part-1.safetensors", "part-2.safetensors"]);
    assert_eq!(server.requests("GET", "part-2.safetensors"), 1);
}

#[test]
fn an_index_cannot_lead_out_of_the_repository() {
    let cache = tempfile::tempdir().unwrap();
    let server = serve();
    server.set("model.safetensors", Answer::Status(404, "EntryNotFound"));
    let index = r#"{"weight_map": {"a": "../../../etc/passwd"}}"#;
    server.set("model.safetensors.index.json", Answer::File(index.into()));
    let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
    assert!(error(&hub, None).contains("outside its folder"));
}

#[test]
fn an_interrupted_download_is_taken_up_again() {
    let cache = tempfile::tempdir().unwrap();
    let server = serve();
    let bytes = bytes_of("model.safetensors");
    let after = bytes.len() / 2;
    server.set(
        "model.safetensors",
        Answer::Cut {
            bytes,
            after,
            times: 2,
        },
    );
    let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
    assert_whole(hub.fetch(ID, None).unwrap());
    assert_eq!(server.requests("GET", "model.safetensors"), 3);
}

#[test]
fn a_download_that_always_breaks_off_is_an_error_and_leaves_no_model() {
    let cache = tempfile::tempdir().unwrap();
    let server = serve();
    let bytes = bytes_of("model.safetensors");
    let after = bytes.len() - 1;
    server.set(
        "model.safetensors",
        Answer::Cut {
            bytes,
            after,
            times: usize::MAX,
        },
    );
    let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
    let said = error(&hub, None);
    assert!(
        said.contains("model.safetensors did not arrive whole in 3 tries"),
        "{said}"
    );
    assert_not_cached(&hub);
    server.set(
        "model.safetensors",
        Answer::File(bytes_of("model.safetensors")),
    );
    assert_whole(hub.fetch(ID, None).unwrap());
}

#[test]
fn what_an_earlier_download_left_is_discarded_where_it_cannot_be_continued() {
    let bytes = bytes_of("model.safetensors");
    // More than the file has, and just as much: then there is nothing left to ask for.
    for left in [bytes.len() + 1, bytes.len()] {
        let cache = tempfile::tempdir().unwrap();
        let server = serve();
        let cut = Answer::Cut {
            bytes: bytes.clone(),
            after: 1000,
            times: 3,
        };
        server.set("model.safetensors", cut);
        let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
        error(&hub, None);
        let part = std::fs::read_dir(cache.path().join("models--tests--tiny/blobs"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| path.extension().is_some_and(|end| end == "part"))
            .unwrap();
        assert_eq!(std::fs::read(&part).unwrap(), bytes[..1000]);
        std::fs::write(&part, vec![0; left]).unwrap();
        assert_whole(hub.fetch(ID, None).unwrap());
    }
}

#[test]
fn a_download_that_stands_still_is_given_up() {
    let cache = tempfile::tempdir().unwrap();
    let server = serve();
    server.set(
        "model.safetensors",
        Answer::Stall {
            bytes: bytes_of("model.safetensors"),
            after: 1000,
        },
    );
    let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
    let begun = Instant::now();
    let said = error(&hub, None);
    assert!(said.contains("did not arrive whole"), "{said}");
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "took {:?}",
        begun.elapsed()
    );
    assert_not_cached(&hub);
}

#[test]
fn an_error_page_is_not_taken_for_the_file() {
    for name in ["model.safetensors", "tokenizer.json"] {
        let cache = tempfile::tempdir().unwrap();
        let server = serve();
        server.set(name, Answer::ErrorPage(bytes_of(name)));
        let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
        assert!(error(&hub, None).contains(name));
        assert_not_cached(&hub);
    }
}

#[test]
fn damaged_files_in_the_cache_are_fetched_again() {
    let cache = tempfile::tempdir().unwrap();
    let server = serve();
    let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
    let weights = safetensors(hub.fetch(ID, None).unwrap())
        .weights
        .remove(0)
        .canonicalize()
        .unwrap();
    let half = bytes_of("model.safetensors").len() / 2;
    std::fs::File::options()
        .write(true)
        .open(&weights)
        .unwrap()
        .set_len(half as u64)
        .unwrap();
    assert_not_cached(&hub);
    assert_whole(hub.fetch(ID, None).unwrap());
}

#[test]
fn says_what_the_hub_lacks() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::serve("tests/other", []);
    let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
    assert_eq!(error(&hub, None), "the hub has no model tests/tiny");
    drop(server);
    let server = serve();
    let hub = Hub::new(&options(server.endpoint(), cache.path())).unwrap();
    assert_eq!(error(&hub, Some("v9")), "tests/tiny has no revision v9");
    server.set("config.json", Answer::Status(404, "EntryNotFound"));
    assert!(error(&hub, None).contains("no config.json"));
    server.set("config.json", Answer::Status(401, "GatedRepo"));
    assert!(error(&hub, None).contains("HF_TOKEN"));
    server.set("config.json", Answer::File(bytes_of("config.json")));
    server.set("tokenizer.json", Answer::Status(404, "EntryNotFound"));
    assert!(error(&hub, None).contains("no tokenizer.json"));
    server.set("tokenizer.json", Answer::File(bytes_of("tokenizer.json")));
    server.set("model.safetensors", Answer::Status(404, "EntryNotFound"));
    assert!(error(&hub, None).contains("no safetensors weights"));
}

#[test]
fn a_hub_out_of_reach_is_noticed_soon() {
    let cache = tempfile::tempdir().unwrap();
    // Nobody listens on a port that was just given back.
    let refused = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let server = serve();
    let check = |endpoint: &str| {
        let hub = Hub::new(&options(endpoint, cache.path())).unwrap();
        let begun = Instant::now();
        let said = error(&hub, None);
        assert!(said.starts_with("hub not reachable"), "{said}");
        assert!(!said.contains('\n'), "{said}");
        assert!(
            begun.elapsed() < Duration::from_secs(4),
            "took {:?}",
            begun.elapsed()
        );
    };
    check(&format!("http://{refused}"));
    server.set(LISTING, Answer::Silence);
    check(server.endpoint());
    server.set(LISTING, Answer::Status(503, "Maintenance"));
    check(server.endpoint());
    server.set(LISTING, Answer::Status(429, "RateLimited"));
    check(server.endpoint());
    // A name that no server has, by the rules of the domain name system.
    check("http://hub.invalid");
}

#[test]
fn an_endpoint_that_is_no_url_is_an_error() {
    let cache = tempfile::tempdir().unwrap();
    let Err(error) = Hub::new(&options("not a url", cache.path())) else {
        panic!("taken")
    };
    assert!(one_line(&error).contains("HF_ENDPOINT"));
}
