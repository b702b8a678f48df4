//! The endpoints other than UDP and TCP, one line each.
//!
//! A line names the module, its type, and after `on` the endpoint that it is built on. Without the
//! line, and without the module and those that are built on it, the engine has no such endpoint
//! (`tools/check-endpoints`).

/// Passes the endpoints with clients to a macro, each with its place in the order of those that
/// receive; UDP has place 1 and TCP place 3.
macro_rules! client_endpoints {
    ($use:ident) => {
        $use! {
            0 peer: Peers;
            2 shm: ShmClients;
        }
    };
}

/// Passes those without clients to a macro.
macro_rules! server_endpoints {
    ($use:ident) => {
        $use! {
            upstream: Upstreams;
            backend: KernelBackends;
            sockets: KernelSockets;
            transfers: KernelTransfers on sockets;
        }
    };
}
