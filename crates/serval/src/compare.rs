pub mod calibration;
pub mod pairs;
pub mod server;
pub mod statistics;
pub mod verdict;
pub mod suite;
