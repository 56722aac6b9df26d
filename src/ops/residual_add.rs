//! Residual additions in one pass.
