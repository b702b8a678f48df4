//! Clients that come and go.

use wire::DropReason;
use wire::nic::Nic;

use super::ShmClients;
use crate::base::process::ShmClient;
use crate::base::topology::Replies;
use crate::base::turn::Turn;
use crate::service::services::Services;

impl ShmClients {
    /// The client with this id is gone.
    pub(super) fn remove_client<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        id: u64,
    ) {
        let of_id = |index: &&u32| {
            let entry = &self.entries[**index as usize];
            entry.active.as_ref().is_some_and(|s| s.client.id == id)
        };
        if let Some(index) = self.open.iter().find(of_id).copied() {
            self.close(turn, services, index);
        }
    }

    pub(super) fn adopt<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        client: ShmClient,
    ) {
        let share = services.get(usize::from(client.service));
        let Some(share) = share.filter(|share| !share.is_vacant()) else {
            // The service has left. Dropping the client closes its connection.
            return turn.shared.release_connection(turn.index);
        };
        if share.owner.as_ref().is_some_and(|owner| !owner.take_connection()) {
            share.count_lost(DropReason::TenantConnections, 1);
            return turn.shared.release_connection(turn.index);
        }
        let goes = turn.draining || share.leaving.is_some();
        share.counters.connections_accepted.one();
        let answers = share.replies == Replies::One;
        let index = self.insert(client, answers);
        if goes {
            self.drain(turn, services, index);
        }
        turn.busy();
    }

    pub(super) fn close<N: Nic>(
        &mut self,
        turn: &mut Turn<N>,
        services: &mut Services,
        index: u32,
    ) {
        self.publish();
        let Some(active) = self.remove(index) else { return };
        turn.shared.release_connection(turn.index);
        let share = &services[active.client.service as usize];
        share.end_connection();
        share.counters.connections_closed.one();
    }
}
