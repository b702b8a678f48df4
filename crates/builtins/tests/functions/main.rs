//! Functions, chains, sketches and modules.

mod builtins;
mod cache;
mod cache_history;
mod cache_tickets;
mod chain;
mod coap_auth;
mod sketch;
