//! The integration tests: one binary, a module per op and per model.

mod flash_attention;
