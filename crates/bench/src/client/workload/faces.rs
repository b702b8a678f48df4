//! Faces for the kernel `faces`: a label and a picture, which is compared with a stored one.

use super::Workload;

/// Labelled pictures: magic, u32 LE count, u32 LE length of a note, the note, then for each person a
/// 12-byte label, the stored picture and a second one (device/models/README.md).
const BUILT_IN: &[u8] = include_bytes!("../../../models/faces_demo.bin");
const MAGIC: &[u8] = b"SVFACES1";
const LABEL_BYTES: usize = 12;
const PICTURE_BYTES: usize = 1024;

/// Two pictures of one person.
#[derive(Clone, Copy, Debug)]
pub struct Person<'a> {
    /// 12 bytes.
    pub label: &'a [u8],
    /// 32 x 32 grey pixels, for the database.
    pub stored: &'a [u8],
    /// The same, for requests.
    pub second: &'a [u8],
}

impl Person<'_> {
    /// The key under which the kernel finds the stored picture.
    pub fn database_key(&self) -> String {
        let hex: String = self.label.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("face:{hex}")
    }
}

/// Pictures of people.
#[derive(Clone, Debug)]
pub struct Pictures<'a> {
    /// Their source.
    pub note: String,
    /// At least two.
    pub people: Vec<Person<'a>>,
}

impl Pictures<'static> {
    /// The built-in ones.
    pub fn built_in() -> Self {
        Pictures::parse(BUILT_IN).expect("the built-in pictures are whole")
    }
}

impl<'a> Pictures<'a> {
    /// Parses a file of pictures; `None` if it is invalid.
    pub fn parse(file: &'a [u8]) -> Option<Self> {
        let rest = file.strip_prefix(MAGIC)?;
        let (count, rest) = rest.split_first_chunk::<4>()?;
        let (note_len, rest) = rest.split_first_chunk::<4>()?;
        let (note, rest) = rest.split_at_checked(u32::from_le_bytes(*note_len) as usize)?;
        let records = rest.chunks_exact(LABEL_BYTES + 2 * PICTURE_BYTES);
        let count = u32::from_le_bytes(*count) as usize;
        if count < 2 || records.len() != count || !records.remainder().is_empty() {
            return None;
        }
        let people = records.map(|record| {
            let (label, pictures) = record.split_at(LABEL_BYTES);
            let (stored, second) = pictures.split_at(PICTURE_BYTES);
            Person { label, stored, second }
        });
        let mut note = String::from_utf8_lossy(note).into_owned();
        note.retain(|c| !c.is_control() || c == '\n');
        Some(Self { note, people: people.collect() })
    }
}

/// A kind of question about a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// The second picture of the same person.
    Same,
    /// The second picture of another person.
    Other,
    /// A label that the database does not know.
    Unknown,
}

/// The kinds of questions; those about known people come first.
const QUESTIONS: [Question; 3] = [Question::Same, Question::Other, Question::Unknown];
/// No match, match, unknown label, no database.
const VERDICTS: usize = 4;

/// Sends every question about every person, repeatedly.
#[derive(Clone, Debug)]
pub struct Faces<'a> {
    people: &'a [Person<'a>],
    /// How many kinds of questions it asks.
    kinds: usize,
    /// Answers by question and verdict.
    counts: [[u64; VERDICTS]; 3],
    /// The first valid answer to each request: later answers to the same request must be equal.
    first: Vec<Option<[u8; Faces::REPLY_BYTES]>>,
}

impl<'a> Faces<'a> {
    /// Length of a request: label and picture.
    pub const REQUEST_BYTES: usize = LABEL_BYTES + PICTURE_BYTES;
    /// Length of a picture.
    pub const PICTURE_BYTES: usize = PICTURE_BYTES;
    /// Length of a reply: u32 LE verdict and float32 LE distance.
    pub const REPLY_BYTES: usize = 8;

    /// About these people.
    pub fn new(people: &'a [Person<'a>]) -> Self {
        let first = vec![None; QUESTIONS.len() * people.len()];
        Self { people, kinds: QUESTIONS.len(), counts: [[0; VERDICTS]; 3], first }
    }

    /// The same without questions about labels that the database does not know.
    pub fn known(people: &'a [Person<'a>]) -> Self {
        Self { kinds: QUESTIONS.len() - 1, ..Self::new(people) }
    }

    /// Number of different requests.
    pub fn different(&self) -> u64 {
        (self.kinds * self.people.len()) as u64
    }

    /// Answers to a question: no match, match, unknown label, no database.
    pub fn answers(&self, question: Question) -> [u64; VERDICTS] {
        self.counts[question as usize]
    }

    fn question(&self, index: u64) -> (usize, usize) {
        let index = (index % self.different()) as usize;
        (index % self.kinds, index / self.kinds)
    }
}

impl Workload for Faces<'_> {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        let (question, person) = self.question(index);
        let somebody_else = &self.people[(person + 1) % self.people.len()];
        let person = &self.people[person];
        into.extend_from_slice(person.label);
        match QUESTIONS[question] {
            Question::Same => into.extend_from_slice(person.second),
            Question::Other => into.extend_from_slice(somebody_else.second),
            Question::Unknown => {
                into.iter_mut().for_each(|byte| *byte = !*byte);
                into.extend_from_slice(person.second);
            }
        }
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let Ok(bytes) = <[u8; Faces::REPLY_BYTES]>::try_from(reply) else { return false };
        let (question, _) = self.question(index);
        let verdict = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        let distance = f32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        if verdict >= VERDICTS || !(0.0..=2048.0).contains(&distance) {
            return false;
        }
        self.counts[question][verdict] += 1;
        // Whether two pictures match is determined by the method; unknown labels are not.
        let plausible = match QUESTIONS[question] {
            Question::Same | Question::Other => verdict < 2,
            Question::Unknown => verdict == 2 && distance == 0.0,
        };
        let number = (index % self.different()) as usize;
        plausible && *self.first[number].get_or_insert(bytes) == bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_about_known_people_are_those_that_the_database_can_answer() {
        let pictures = Pictures::built_in();
        let labels: Vec<&[u8]> = pictures.people.iter().map(|person| person.label).collect();
        let asked = |faces: &mut Faces<'_>| {
            let different = faces.different();
            let label = |index| {
                let mut request = Vec::new();
                faces.request(index, &mut request);
                request[..LABEL_BYTES].to_vec()
            };
            (0..different).map(label).collect::<Vec<_>>()
        };
        let is_known = |label: &Vec<u8>| labels.contains(&&label[..]);
        let known = asked(&mut Faces::known(&pictures.people));
        assert!(known.len() == 2 * labels.len() && known.iter().all(is_known));
        let all = asked(&mut Faces::new(&pictures.people));
        assert_eq!(all.iter().filter(|label| is_known(label)).count(), 2 * labels.len());
        assert_eq!(all.len(), 3 * labels.len());
    }

    #[test]
    fn the_built_in_pictures_are_whole_and_damaged_files_are_refused() {
        let pictures = Pictures::built_in();
        assert!(
            pictures.people.len() >= 10 && pictures.note.contains("ynthetic"),
            "{}",
            pictures.note
        );
        for cut in [0, 5, 9, 13, 20, BUILT_IN.len() - 1] {
            assert!(Pictures::parse(&BUILT_IN[..cut]).is_none(), "{cut}");
        }
    }

    #[test]
    fn questions_are_asked_in_turn_and_answers_checked() {
        let pictures = Pictures::built_in();
        let mut faces = Faces::new(&pictures.people);
        let mut requests = Vec::new();
        for index in 0..faces.different() {
            let mut request = Vec::new();
            faces.request(index, &mut request);
            assert_eq!(request.len(), Faces::REQUEST_BYTES);
            requests.push(request);
        }
        assert_eq!(requests[0][..12], requests[1][..12]);
        assert_ne!(requests[0][12..], requests[1][12..]);
        assert_ne!(requests[0][..12], requests[2][..12]);
        let reply =
            |verdict: u32, distance: f32| [verdict.to_le_bytes(), distance.to_le_bytes()].concat();
        assert!(faces.accepts(0, &reply(1, 10.0)));
        assert!(faces.accepts(1, &reply(0, 2000.0)));
        assert!(faces.accepts(2, &reply(2, 0.0)));
        // Another answer to the same question than the first.
        let again = faces.different();
        assert!(faces.accepts(again, &reply(1, 10.0)));
        assert!(!faces.accepts(again, &reply(1, 11.0)));
        assert!(!faces.accepts(0, &reply(0, 10.0)));
        assert!(!faces.accepts(2, &reply(2, 1.0)), "nothing was compared");
        assert!(!faces.accepts(2, &reply(1, 0.0)));
        assert!(!faces.accepts(0, &reply(3, 0.0)));
        assert!(!faces.accepts(0, &reply(4, 0.0)));
        assert!(!faces.accepts(0, &reply(1, f32::NAN)));
        assert!(!faces.accepts(0, b"short"));
        assert_eq!(faces.answers(Question::Same), [1, 3, 0, 1]);
    }
}
