//! stub
/// stub
#[derive(Clone,Copy,Debug,PartialEq,Eq)]
pub enum RopeStyle { /// h
 HalfSplit, /// i
 Interleaved }
