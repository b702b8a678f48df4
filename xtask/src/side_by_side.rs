//! Parallel work on a list of items.

use std::sync::Mutex;

use crate::Findings;

/// How many processors there are.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Applies `work` to each item, `at_a_time` in parallel; returns the results in order.
pub(crate) fn side_by_side<T: Send, O: Send>(
    at_a_time: usize,
    items: Vec<T>,
    work: impl Fn(T) -> O + Sync,
) -> Vec<O> {
    let mut done: Vec<Option<O>> = items.iter().map(|_| None).collect();
    let queue = Mutex::new(items.into_iter().zip(&mut done));
    std::thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().expect("no thread panics while holding it").next();
                    let Some((item, place)) = next else { break };
                    *place = Some(work(item));
                }
            });
        }
    });
    drop(queue);
    done.into_iter().map(|done| done.expect("each item was processed")).collect()
}

/// Like [`side_by_side`], for work that can fail: all results, or all findings.
pub(crate) fn all_sound<T: Send, O: Send>(
    at_a_time: usize,
    items: Vec<T>,
    work: impl Fn(T) -> Result<O, String> + Sync,
) -> Result<Vec<O>, Findings> {
    let (mut sound, mut findings) = (Vec::new(), Findings::new());
    for outcome in side_by_side(at_a_time, items, work) {
        match outcome {
            Ok(value) => sound.push(value),
            Err(finding) => findings.push(finding),
        }
    }
    if findings.is_empty() { Ok(sound) } else { Err(findings) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_done_once_and_comes_back_in_order() {
        let doubled = side_by_side(3, (0..100).collect(), |n| {
            std::thread::sleep(std::time::Duration::from_micros(100 - n));
            2 * n
        });
        assert_eq!(doubled, (0..100).map(|n| 2 * n).collect::<Vec<_>>());
    }

    #[test]
    fn all_findings_are_told() {
        let odd = |n: u32| if n % 2 == 0 { Ok(n) } else { Err(n.to_string()) };
        assert_eq!(all_sound(2, vec![2, 4], odd), Ok(vec![2, 4]));
        assert_eq!(all_sound(2, vec![1, 2, 3], odd), Err(vec!["1".to_owned(), "3".to_owned()]));
    }
}
