use proptest::prelude::*;
use tokenizers::Tokenizer;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::Replace;

use super::tiny;
use crate::allocations::allocations;
use crate::common::token_stream::TokenStream;
use crate::common::tokenizer::Text;

/// The text in pieces, the last of them what `finish` gives.
fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut stream = TokenStream::new(tokenizer);
    let mut pieces: Vec<_> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

/// A vocabulary as Llama 2 has it: words with `▁` for blanks, and a token for every byte.
fn with_byte_fallback() -> Tokenizer {
    let words = ["<unk>", "▁a", "▁the", "b", "é", "▁"].map(str::to_owned);
    let vocab: Vocab = words
        .into_iter()
        .chain((0..=255).map(|b| format!("<0x{b:02X}>")))
        .zip(0..)
        .collect();
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, vec![])
        .byte_fallback(true)
        .unk_token("<unk>".into());
    let mut tokenizer = Tokenizer::new(bpe.build().unwrap());
    tokenizer.with_decoder(Some(Sequence::new(vec![
        Replace::new("▁", " ").unwrap().into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ])));
    tokenizer
}

fn byte_ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    text.bytes()
        .map(|b| tokenizer.token_to_id(&format!("<0x{b:02X}>")).unwrap())
        .collect()
}

#[test]
fn characters_come_whole_however_they_are_split() {
    let tokenizer = tiny::tokenizer();
    for text in [
        "the theme",
        " leading",
        "naïve",
        "日本語",
        "😀👩‍👩‍👧!",
        "a\n\nb\t",
        "текст",
    ] {
        let ids = tokenizer
            .encode_fast(text, false)
            .unwrap()
            .get_ids()
            .to_vec();
        let pieces = pieces(&tokenizer, &ids);
        assert_eq!(pieces.concat(), text);
        assert_eq!(pieces.last().unwrap(), "", "{text}: held back to the end");
        assert!(!pieces.concat().contains(char::REPLACEMENT_CHARACTER));
    }
    let ids = tokenizer
        .encode_fast("é", false)
        .unwrap()
        .get_ids()
        .to_vec();
    assert_eq!(pieces(&tokenizer, &ids), ["", "é", ""]);
}

#[test]
fn every_byte_of_utf_8_comes_back() {
    let text = Text::made_up(256).unwrap();
    // All first and second bytes, and first bytes of four.
    let all = (1..0x800).chain((0x800..0x11_0000).step_by(0x3ff));
    let written: String = all.filter_map(char::from_u32).collect();
    let ids = text.encode_prompt(&written).unwrap();
    assert_eq!(ids.len(), written.len());
    assert!(pieces(text.tokenizer(), &ids).concat() == written);
}

#[test]
fn bytes_that_are_no_character_are_replaced_and_hold_nothing_up() {
    let tokenizer = tiny::tokenizer();
    // Letters, and bytes from 0xA1 on but 0xAD, stand for themselves.
    let id = |byte: u8| {
        tokenizer
            .token_to_id(&char::from(byte).to_string())
            .unwrap()
    };
    // A lone continuation byte, then a character that was begun and never ended.
    assert_eq!(
        pieces(&tokenizer, &[id(0xB0), id(b'a')]),
        ["\u{FFFD}", "a", ""]
    );
    assert_eq!(
        pieces(&tokenizer, &[id(0xC3), id(b'a')]),
        ["", "\u{FFFD}a", ""]
    );
    assert_eq!(
        pieces(&tokenizer, &[id(0xE6), id(0xA5)]),
        ["", "", "\u{FFFD}"]
    );
}

#[test]
fn special_tokens_are_not_shown_and_other_added_tokens_are() {
    let mut tokenizer = tiny::tokenizer();
    tokenizer
        .add_tokens([
            tokenizers::AddedToken::from("    ", false),
            tokenizers::AddedToken::from("é→", false),
        ])
        .unwrap();
    let ids = tokenizer
        .encode_fast("<|im_start|>    é→the", false)
        .unwrap()
        .get_ids()
        .to_vec();
    assert_eq!(pieces(&tokenizer, &ids).concat(), "    é→the");
}

#[test]
fn ids_beyond_the_vocabulary_are_silent() {
    assert_eq!(pieces(&tiny::tokenizer(), &[u32::MAX]).concat(), "");
}

#[test]
fn decoders_that_are_not_byte_level_stream_as_well() {
    let tokenizer = with_byte_fallback();
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    let mut ids = vec![id("▁the"), id("b")];
    ids.extend(byte_ids(&tokenizer, "😀"));
    ids.extend([id("▁a"), id("é")]);
    let parts = pieces(&tokenizer, &ids);
    assert_eq!(parts.concat(), " theb😀 aé");
    assert_eq!(parts[..6], [" the", "b", "", "", "", "😀"]);
}

proptest! {
    #[test]
    fn any_bytes_come_out_as_the_tokenizer_decodes_them(ids in proptest::collection::vec(0u32..262, 0..60)) {
        let tokenizer = tiny::tokenizer();
        prop_assert_eq!(pieces(&tokenizer, &ids).concat(), tokenizer.decode(&ids, true).unwrap());
    }

    #[test]
    fn any_text_comes_out_unchanged(text in "\\PC{0,30}") {
        let bytes = tiny::tokenizer();
        let ids = bytes.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
        prop_assert_eq!(pieces(&bytes, &ids).concat(), text.clone());
        // In this vocabulary the replacement character itself looks like one that is not whole yet.
        let text = text.replace(char::REPLACEMENT_CHARACTER, "");
        let fallback = with_byte_fallback();
        let ids = byte_ids(&fallback, &text);
        prop_assert_eq!(pieces(&fallback, &ids).concat(), text);
    }
}

/// What a token asks of the allocator, which every text that a decoder makes does, stays the same.
#[test]
fn long_texts_take_linear_work() {
    let work = |tokenizer: &Tokenizer, ids: &[u32]| allocations(|| drop(pieces(tokenizer, ids)));
    for (tokenizer, token) in [(tiny::tokenizer(), 200), (with_byte_fallback(), 6 + 0xA5)] {
        work(&tokenizer, &[token; 100]);
        let short = work(&tokenizer, &[token; 200]);
        let long = work(&tokenizer, &[token; 2_000]);
        assert!(long <= 11 * short, "{short} and {long}");
    }
}
