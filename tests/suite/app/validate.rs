use crate::common::report::one_line;
use crate::common::validate;
use proptest::prelude::*;

fn safetensors(bytes: &[u8]) -> Result<(), String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    validate::safetensors(file.path()).map_err(|error| one_line(&error))
}

fn good() -> Vec<u8> {
    let header = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend([0; 6]);
    bytes
}

#[test]
fn a_whole_file_passes() {
    safetensors(&good()).unwrap();
}

#[test]
fn every_cut_is_noticed() {
    let good = good();
    for len in 0..good.len() {
        let said = safetensors(&good[..len]).unwrap_err();
        assert!(said.contains("fetch it again"), "{said}");
    }
    let mut longer = good;
    longer.push(0);
    safetensors(&longer).unwrap_err();
}

proptest! {
    #[test]
    fn no_content_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = safetensors(&bytes);
    }

    #[test]
    fn no_header_makes_it_panic(at in 8usize..140, byte in any::<u8>()) {
        let mut bytes = good();
        bytes[at] = byte;
        let _ = safetensors(&bytes);
    }
}
