//! The endpoints without clients together: what services and their blocks use. See `table.rs`.

use std::ops::Range;
use std::sync::Arc;

use mqueue::Role;
use onpath::{Arranged, Chain, Link};
use sockets::Books;
use wire::DropReason;
use wire::nic::{Event, Nic, PortIndex, StreamKey};
use wire::session::{Origin, ReplyTo};

use crate::admit::servers::{NoServers, Relayed, Servers};
use crate::base::arrival::{Arrival, Message, Refusal};
use crate::base::keys::StreamOwner;
use crate::base::metrics::ServiceCounters;
use crate::base::topology::{Limits, Service};
use crate::base::turn::Turn;
use crate::endpoint::clients::Clients;
use crate::endpoint::{Endpoint, PerService};
use crate::schedule::Schedule;
use crate::service::ends::OtherEnds;
use crate::service::services::Services;
use crate::service::share::ServiceShare;

/// Declares [`ServerSide`] and [`Parts`] for a table of endpoints.
macro_rules! declare {
    ($( $name:ident : $type:ident $(on $below:ident)? ; )*) => {
        /// See the module documentation.
        #[derive(Default)]
        pub(crate) struct ServerSide {
            $( $name: crate::endpoint::$name::$type, )*
        }

        /// What these endpoints have of one service.
        pub(crate) struct Parts {
            $( $name: <crate::endpoint::$name::$type as PerService>::Part, )*
        }

        impl Parts {
            /// Of one worker. Each endpoint takes its rings out of `ends`.
            pub(crate) fn new(
                service: &Service,
                worker: u16,
                ends: &mut [OtherEnds],
                counters: &Arc<ServiceCounters>,
            ) -> Self {
                Self {
                    $( $name: crate::endpoint::$name::$type::prepare(
                        service, worker, ends, counters,
                    ), )*
                }
            }

            /// Gives the path to a backend these functions.
            pub(crate) fn set_path(&mut self, backend: u16, mut functions: Vec<Arranged>) {
                $( crate::endpoint::$name::$type::set_path(
                    &mut self.$name, backend, &mut functions,
                ); )*
            }
        }

        // As `Endpoint` says.
        impl ServerSide {
            pub(super) fn event<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                event: Event,
                owner: StreamOwner,
            ) {
                $( self.$name.event(turn, event, owner); )*
            }

            #[inline(always)]
            pub(super) fn before_drive<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                schedule: &mut Schedule,
            ) {
                $( self.$name.before_drive(turn, services, schedule); )*
            }

            #[inline(always)]
            pub(super) fn gather<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                service: usize,
            ) {
                $( self.$name.gather(turn, services, service); )*
            }

            pub(super) fn take<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                service: usize,
                ring: (Role, u32),
            ) {
                $( self.$name.take(turn, services, service, ring); )*
            }

            #[inline(always)]
            pub(super) fn exchange<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                schedule: &mut Schedule,
                clients: &mut Clients,
            ) {
                $( $( self.$name.borrow(turn, &mut self.$below); )? )*
                $( self.$name.exchange(turn, services, schedule, clients); )*
            }

            #[inline(always)]
            pub(super) fn flush<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                may_defer: bool,
            ) {
                $( self.$name.flush(turn, services, &mut NoServers, may_defer); )*
            }

            pub(super) fn expire<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                clients: &mut Clients,
                service: usize,
            ) {
                $( self.$name.expire(turn, services, clients, service); )*
            }

            pub(crate) fn note_corrupt<N: Nic>(
                &mut self,
                share: &mut ServiceShare,
                service: usize,
            ) {
                $( Endpoint::<N>::note_corrupt(&mut self.$name, share, service); )*
            }

            pub(crate) fn end_blocks<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                service: usize,
                blocks: Range<u32>,
                are_lost: bool,
            ) {
                $( self.$name.end_blocks(turn, service, blocks.clone(), are_lost); )*
            }

            pub(crate) fn replace_rings<N: Nic>(
                &mut self,
                service: usize,
                ends: &mut [OtherEnds],
            ) {
                $( Endpoint::<N>::replace_rings(&mut self.$name, service, ends); )*
            }

            pub(super) fn place<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                service: u16,
                parts: Parts,
            ) -> Parts {
                Parts { $( $name: self.$name.place(turn, service, parts.$name), )* }
            }

            pub(super) fn remove<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) -> Parts {
                Parts { $( $name: self.$name.remove(turn, service), )* }
            }

            pub(super) fn move_to<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &Services,
                from: u16,
                to: u16,
            ) {
                $( self.$name.move_to(turn, services, from, to); )*
            }

            pub(super) fn leave<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                service: Option<u16>,
            ) {
                $( self.$name.leave(turn, services, &mut NoServers, service); )*
            }

            pub(super) fn drop_requests<N: Nic>(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                clients: &mut Clients,
                service: usize,
                reason: DropReason,
            ) {
                $( self.$name.drop_requests(turn, services, clients, service, reason); )*
            }

            pub(super) fn release<N: Nic>(&mut self, turn: &mut Turn<N>, service: u16) {
                $( self.$name.release(turn, service); )*
            }

            pub(super) fn set_limits<N: Nic>(&mut self, limits: &Limits) {
                $( Endpoint::<N>::set_limits(&mut self.$name, limits); )*
            }

            pub(super) fn arrange_path<N: Nic>(
                &mut self,
                service: usize,
                backend: u16,
                order: &mut Vec<Arranged>,
            ) -> Vec<Link> {
                let mut former = Vec::new();
                $( former.extend(
                    Endpoint::<N>::arrange_path(&mut self.$name, service, backend, order),
                ); )*
                former
            }

            pub(super) fn chain_of<N: Nic>(
                &mut self,
                service: usize,
                backend: u16,
            ) -> Option<&mut Chain> {
                $( if let Some(chain) =
                    Endpoint::<N>::chain_of(&mut self.$name, service, backend)
                {
                    return Some(chain);
                } )*
                None
            }

            pub(super) fn take_function_ns<N: Nic>(&mut self, service: usize) -> u64 {
                0 $( + Endpoint::<N>::take_function_ns(&mut self.$name, service) )*
            }

            pub(crate) fn asks<N: Nic>(&self, share: &ServiceShare, service: usize) -> bool {
                false $( || Endpoint::<N>::asks(&self.$name, share, service) )*
            }

            pub(crate) fn is_connected<N: Nic>(&self, service: u16, blocks: &Range<u32>) -> bool {
                false $( || Endpoint::<N>::is_connected(&self.$name, service, blocks) )*
            }

            pub(crate) fn outstanding<N: Nic>(&self, service: u16) -> u64 {
                0 $( + Endpoint::<N>::outstanding(&self.$name, service) )*
            }

            pub(super) fn wake_at<N: Nic>(&self, now_ns: u64, services: &Services) -> u64 {
                u64::MAX $( .min(Endpoint::<N>::wake_at(&self.$name, now_ns, services)) )*
            }

            pub(crate) fn stream_bytes<N: Nic>(&self, service: u16) -> [(Books, u64); 2] {
                $( if let Some(bytes) = Endpoint::<N>::stream_bytes(&self.$name, service) {
                    return bytes;
                } )*
                Default::default()
            }
        }

        // The endpoint that serves a service does it.
        impl<N: Nic> Servers<N> for ServerSide {
            fn submit(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                service: usize,
                arrival: &Arrival,
                message: &mut impl Message,
            ) -> Result<(), Refusal> {
                $( if Servers::<N>::serves(&self.$name, service) {
                    return self.$name.submit(turn, services, service, arrival, message);
                } )*
                Err(Refusal::Drop(DropReason::NoAccelerator))
            }

            fn unspent(&mut self, service: usize, origin: &Origin) -> Option<u32> {
                $( if Servers::<N>::serves(&self.$name, service) {
                    return Servers::<N>::unspent(&mut self.$name, service, origin);
                } )*
                None
            }

            fn spend(&mut self, service: usize, origin: &Origin, bytes: u64) {
                $( if Servers::<N>::serves(&self.$name, service) {
                    Servers::<N>::spend(&mut self.$name, service, origin, bytes);
                } )*
            }

            fn holds_client(&mut self, service: usize, client: StreamKey) -> bool {
                false $( || Servers::<N>::holds_client(&mut self.$name, service, client) )*
            }

            fn delays_close(&mut self, service: usize, client: StreamKey) -> bool {
                false $( || Servers::<N>::delays_close(&mut self.$name, service, client) )*
            }

            fn close_stream(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                service: usize,
                client: StreamKey,
            ) {
                $( Servers::close_stream(&mut self.$name, turn, services, service, client); )*
            }

            fn begin_relay(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                service: usize,
                client: &ReplyTo,
            ) -> Relayed {
                $( if Servers::<N>::serves(&self.$name, service) {
                    return self.$name.begin_relay(turn, services, service, client);
                } )*
                Relayed::Refused
            }

            fn relay_to_server(
                &mut self,
                turn: &mut Turn<N>,
                services: &mut Services,
                service: usize,
                client: StreamKey,
                chunk: &[u8],
            ) -> Option<DropReason> {
                $( if Servers::<N>::serves(&self.$name, service) {
                    return self.$name.relay_to_server(turn, services, service, client, chunk);
                } )*
                Some(DropReason::UpstreamRefused)
            }

            fn end_relay_input(&mut self, turn: &mut Turn<N>, service: usize, client: StreamKey) {
                $( self.$name.end_relay_input(turn, service, client); )*
            }

            fn relay_taken(
                &mut self,
                turn: &mut Turn<N>,
                service: usize,
                client: StreamKey,
            ) -> bool {
                false $( || self.$name.relay_taken(turn, service, client) )*
            }

            fn is_relay_finished(&mut self, service: usize, client: StreamKey) -> bool {
                false $( || Servers::<N>::is_relay_finished(&mut self.$name, service, client) )*
            }

            fn accept(
                &mut self,
                turn: &mut Turn<N>,
                services: &Services,
                service: u16,
                port: PortIndex,
                socket: u16,
            ) -> bool {
                false $( || self.$name.accept(turn, services, service, port, socket) )*
            }
        }
    };
}

server_endpoints!(declare);

impl ServerSide {
    /// Blocks of a service whose mqueues are dead have ended.
    pub(crate) fn end_dead_blocks<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        share: &ServiceShare,
        service: usize,
    ) {
        for (block, load) in (0..).zip(&share.loads) {
            // For an absent accelerator this was done before, and the rings may already be those of
            // the next generation.
            if !load.alive && !load.absent {
                self.end_blocks(turn, service, block..block + 1, false);
            }
        }
    }
}
