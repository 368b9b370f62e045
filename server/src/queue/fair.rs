// SPDX-License-Identifier: Apache-2.0
//! A queue that is fair between clients: they take turns, whatever the number of their requests.

use std::collections::VecDeque;

use super::job::Client;

/// Waiting items by client. The client at the front is served next, then goes to the back.
#[derive(Debug)]
pub struct FairQueue<T> {
    ring: VecDeque<(Client, VecDeque<T>)>,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { ring: VecDeque::new() }
    }
}

impl<T> FairQueue<T> {
    /// Appends to `client`'s own line.
    pub fn push(&mut self, client: Client, item: T) {
        match self.ring.iter_mut().find(|(name, _)| *name == client) {
            Some((_, line)) => line.push_back(item),
            None => self.ring.push_back((client, VecDeque::from([item]))),
        }
    }

    /// Takes the next item.
    pub fn pop(&mut self) -> Option<T> {
        let (client, mut line) = self.ring.pop_front()?;
        let item = line.pop_front();
        if !line.is_empty() {
            self.ring.push_back((client, line));
        }
        item
    }

    /// Takes out the first item that `wanted` picks.
    pub fn remove(&mut self, wanted: impl Fn(&T) -> bool) -> Option<T> {
        let (index, place) = self
            .ring
            .iter()
            .enumerate()
            .find_map(|(index, (_, line))| Some((index, line.iter().position(&wanted)?)))?;
        let item = self.ring[index].1.remove(place);
        if self.ring[index].1.is_empty() {
            self.ring.remove(index);
        }
        item
    }

    /// All items in the order in which [`Self::pop`] would give them if nothing were added.
    pub fn order(&self) -> impl Iterator<Item = &T> {
        let rounds = self.ring.iter().map(|(_, line)| line.len()).max().unwrap_or(0);
        (0..rounds).flat_map(|round| self.ring.iter().filter_map(move |(_, line)| line.get(round)))
    }

    /// The items that would be served before one that `client` adds now.
    pub fn ahead_of_next(&self, client: &Client) -> impl Iterator<Item = &T> {
        let own = self.len_of(client);
        let place = self.ring.iter().position(|(name, _)| name == client).unwrap_or(self.ring.len());
        (0..=own).flat_map(move |round| {
            let turns = if round < own { self.ring.len() } else { place };
            self.ring.iter().take(turns).filter_map(move |(_, line)| line.get(round))
        })
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.ring.iter().map(|(_, line)| line.len()).sum()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// Number of `client`'s items.
    pub fn len_of(&self, client: &Client) -> usize {
        self.ring.iter().find(|(name, _)| name == client).map_or(0, |(_, line)| line.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(items: &[(&str, u32)]) -> FairQueue<u32> {
        let mut queue = FairQueue::default();
        for (client, item) in items {
            queue.push((*client).into(), *item);
        }
        queue
    }

    #[test]
    fn clients_take_turns() {
        let mut queue = filled(&[("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)]);
        let order: Vec<u32> = queue.order().copied().collect();
        assert_eq!(order, [1, 4, 5, 2, 6, 3]);
        assert_eq!(std::iter::from_fn(|| queue.pop()).collect::<Vec<_>>(), order);
        assert!(queue.is_empty());
    }

    #[test]
    fn knows_what_goes_before_a_new_item() {
        let queue = filled(&[("a", 1), ("a", 2), ("a", 3), ("b", 4)]);
        let ahead = |client: &str| queue.ahead_of_next(&client.into()).copied().collect::<Vec<_>>();
        assert_eq!(ahead("a"), [1, 4, 2, 3]);
        assert_eq!(ahead("b"), [1, 4, 2]);
        assert_eq!(ahead("new"), [1, 4]);
    }

    #[test]
    fn removes_one_item_and_forgets_empty_clients() {
        let mut queue = filled(&[("a", 1), ("b", 2)]);
        assert_eq!(queue.remove(|item| *item == 1), Some(1));
        assert_eq!(queue.remove(|item| *item == 9), None);
        assert_eq!((queue.len(), queue.len_of(&"a".into()), queue.len_of(&"b".into())), (1, 0, 1));
    }
}
