//! Functions as objects of users: created, attached, replaced and destroyed by their owners only. The users are those that connections would
//! have: the tests need no second user of the machine.

mod common;

use std::path::Path;

use common::change::{Askers, change, never, service};
use common::*;
use engine::topology::{EngineSettings, Service, Topology};
use onpath::{OnFailure, Spec};
use server::{
    Attachment, Caller, Origin, Place, REFUSED, RegisterAction, Replacement, Server, Target,
};

fn wasm() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../functions/threshold.wasm");
    std::fs::read(path).unwrap()
}

/// Two users that are not the operator.
fn users() -> [Caller; 2] {
    [1, 2].map(|more| Caller { user: Caller::engine().user + more, connection: Some(more.into()) })
}

/// A service to which both may attach functions, and one of the operator.
fn services() -> [Service; 2] {
    let mut shared = service("shared", vec![udp(), tcp()], "echo");
    shared.function_users = users().map(|caller| caller.user).into();
    [shared, service("own", vec![udp(), tcp()], "echo")]
}

fn threshold(name: &str, high: u64) -> Spec {
    let mut spec = Spec::new(name, "threshold");
    spec.params = vec![("offset".into(), 0.into()), ("high".into(), high.into())];
    spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
    spec
}

fn as_module(spec: Spec) -> Spec {
    Spec { function: "/a/name/for/people.wasm".into(), ..spec }
}

fn named(service: &str, name: &str) -> Target {
    Target::Named { service: service.into(), name: name.into() }
}

fn names(server: &Server, caller: Caller) -> Vec<String> {
    server
        .functions
        .list(&server.engine, caller)
        .into_iter()
        .map(|function| function.spec.name)
        .collect()
}

fn refused(server: &Server, reason: &str) -> u64 {
    let at = REFUSED.iter().position(|(_, name)| *name == reason).unwrap();
    server.functions.counters().refused()[at]
}

fn register(server: &mut Server, caller: Caller, target: &Target, name: &str) -> u64 {
    let read =
        server.functions.registers(&server.engine, caller, target, &RegisterAction::Read).unwrap();
    read.iter().find(|(of, _)| of == name).unwrap().1
}

fn text<T>(result: Result<T, server::FunctionError>) -> String {
    result.err().expect("it is refused").to_string()
}

#[test]
fn a_function_is_created_attached_commanded_detached_and_destroyed_by_its_user() {
    let _alone = alone();
    let mut server = start(topology(services().into()));
    let [user, _] = users();
    let spec = as_module(threshold("limits", 1000));
    let id = server.functions.create(&server.engine, user, &spec, Some(wasm()), false).unwrap();
    let target = Target::Id(id);
    assert_eq!(server.metrics().functions().len(), 0, "no worker has it");
    let twice = text(server.functions.create(&server.engine, user, &spec, Some(wasm()), false));
    assert!(twice.contains("has created a function \"limits\" already"), "{twice}");
    let early =
        text(server.functions.registers(&server.engine, user, &target, &RegisterAction::Read));
    assert_eq!(
        early,
        "function \"limits\" is not attached, so it has no registers: attach it first"
    );
    let attached = server
        .functions
        .attach_created(&server.engine, user, id, "shared", &Place::Default)
        .unwrap();
    assert_eq!(attached, Attachment { id, replaced: false });
    let again =
        text(server.functions.attach_created(&server.engine, user, id, "shared", &Place::Default));
    assert_eq!(
        again,
        "function \"limits\" is attached to service \"shared\" already: detach it first"
    );
    let client = udp_client(address(&server, 0));
    assert_eq!(ask(&client, &[0; 32]), [0; 32]);
    assert_eq!(register(&mut server, user, &target, "count"), 1);
    let write = RegisterAction::Write("low".into(), 7);
    server.functions.registers(&server.engine, user, &named("shared", "limits"), &write).unwrap();
    let attached = text(server.functions.destroy(&server.engine, user, id));
    assert_eq!(attached, "function \"limits\" is attached to service \"shared\": detach it first");
    assert!(matches!(
        server.functions.detach(&server.engine, user, &target).unwrap(),
        Origin::Created { .. }
    ));
    assert_eq!(ask(&client, &[0; 32]), [0; 32], "nothing stops it");
    // Attached again it has its settings, and its registers begin again.
    server.functions.attach_created(&server.engine, user, id, "shared", &Place::Default).unwrap();
    let values = ["low", "high", "count"].map(|name| register(&mut server, user, &target, name));
    assert_eq!(values, [7, 1000, 0]);
    server.functions.detach(&server.engine, user, &target).unwrap();
    server.functions.destroy(&server.engine, user, id).unwrap();
    assert!(server.functions.list(&server.engine, Caller::engine()).is_empty());
    let other = server.functions.create(&server.engine, user, &spec, Some(wasm()), false).unwrap();
    assert_ne!(other, id, "no id is used again");
    let gone =
        text(server.functions.attach_created(&server.engine, user, id, "shared", &Place::Default));
    assert!(
        gone.starts_with(&format!("there is no function {id} of user {}", user.user)),
        "{gone}"
    );
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

#[test]
fn nobody_but_the_owner_and_the_operator_can_touch_a_function() {
    let _alone = alone();
    let [mut shared, own] = services();
    shared.functions = vec![threshold("of-file", 1000)];
    let mut server = start(topology(vec![shared, own]));
    let ([owner, other], engine) = (users(), Caller::engine());
    let id =
        server.functions.create(&server.engine, owner, &threshold("a", 9), None, false).unwrap();
    server.functions.attach_created(&server.engine, owner, id, "shared", &Place::Default).unwrap();
    let in_file = server.functions.list(&server.engine, Caller::engine())[0].id;
    assert_eq!(names(&server, engine), ["of-file", "a"]);
    assert_eq!(names(&server, owner), ["a"]);
    assert_eq!(names(&server, other), [""; 0]);
    // Nor by a name that is right, or by an error.
    for name in ["of-file", "nothing"] {
        let beside = Place::Before(name.into());
        let answer = text(server.functions.attach_new(
            &server.engine,
            owner,
            "shared",
            &threshold("b", 1),
            None,
            &beside,
        ));
        let expected =
            format!("service \"shared\" has no function {name:?} to be placed at: it has a");
        assert_eq!(answer, expected);
    }
    let put = Replacement { params: Some(Vec::new()), ..Replacement::default() };
    let mut expected = 0;
    // The ids of others, ids near them, and others.
    for id in [id, in_file, id + 1, in_file - 1, 0, 1, u64::MAX] {
        let target = Target::Id(id);
        let answers = [
            text(server.functions.attach_created(
                &server.engine,
                other,
                id,
                "shared",
                &Place::Default,
            )),
            text(server.functions.detach(&server.engine, other, &target)),
            text(server.functions.destroy(&server.engine, other, id)),
            text(server.functions.replace(&server.engine, other, &target, &put, None)),
            text(server.functions.registers(&server.engine, other, &target, &RegisterAction::Read)),
            text(server.functions.registers(
                &server.engine,
                other,
                &target,
                &RegisterAction::Reset,
            )),
            text(server.functions.registers(
                &server.engine,
                other,
                &target,
                &RegisterAction::Write("high".into(), 1),
            )),
        ];
        let same = format!(
            "there is no function {id} of user {}: `serval fn list` shows those that there are",
            other.user
        );
        assert!(answers.iter().all(|answer| *answer == same), "{answers:?}");
        expected += answers.len() as u64;
        assert_eq!(refused(&server, "function"), expected);
    }
    for name in ["a", "of-file", "neither"] {
        let answer = text(server.functions.detach(&server.engine, other, &named("shared", name)));
        assert_eq!(answer, format!("service \"shared\" has no function \"{name}\": it has none"));
        let answer = text(server.functions.detach(&server.engine, other, &named("own", name)));
        assert_eq!(answer, "there is no service \"own\": this server has shared");
    }
    // Nor can a service be taken that is not the user's, or a name that another one has.
    let services = [
        text(server.functions.attach_new(
            &server.engine,
            owner,
            "own",
            &threshold("b", 9),
            None,
            &Place::Default,
        )),
        text(server.functions.attach_new(
            &server.engine,
            owner,
            "none",
            &threshold("b", 9),
            None,
            &Place::Default,
        )),
    ];
    assert_eq!(services[0], "there is no service \"own\": this server has shared");
    assert_eq!(services[1], "there is no service \"none\": this server has shared");
    let taken = text(server.functions.attach_new(
        &server.engine,
        other,
        "shared",
        &threshold("a", 9),
        None,
        &Place::Default,
    ));
    assert!(taken.starts_with("service \"shared\" has another function \"a\""), "{taken}");
    let stranger = Caller { user: engine.user + 3, connection: Some(3) };
    let answer = text(server.functions.attach_new(
        &server.engine,
        stranger,
        "shared",
        &threshold("c", 1),
        None,
        &Place::Default,
    ));
    assert_eq!(answer, "there is no service \"shared\": this server has none");
    // The engine opens no file for a user.
    let file = text(server.functions.create(
        &server.engine,
        other,
        &as_module(threshold("f", 1)),
        None,
        false,
    ));
    assert!(file.contains("opens no files for user"), "{file}");
    // A trace would show what the functions of others decide.
    let traced = text(server.functions.begin_trace(&server.engine, owner, "shared", 1));
    assert!(traced.contains("has functions of others"), "{traced}");
    assert!(
        text(server.functions.begin_trace(&server.engine, stranger, "shared", 1))
            .contains("there is no service")
    );
    assert!(
        text(server.functions.end_trace(&server.engine, engine, "shared", true).map(drop))
            .contains("no trace")
    );
    assert!(
        text(server.functions.begin_trace(&server.engine, engine, "shared", 101))
            .contains("1 to 100 messages")
    );
    // A user has a limit, and the operator may do everything.
    for number in 0..16 {
        server
            .functions
            .create(&server.engine, other, &threshold(&format!("m{number}"), 1), None, false)
            .unwrap();
    }
    let many =
        text(server.functions.create(&server.engine, other, &threshold("more", 1), None, false));
    assert!(many.contains("a user has at most 16"), "{many}");
    assert_eq!(refused(&server, "limit"), 1);
    assert_eq!(register(&mut server, engine, &Target::Id(id), "high"), 9, "nothing has changed it");
    server.functions.detach(&server.engine, engine, &Target::Id(id)).unwrap();
    server.functions.destroy(&server.engine, engine, id).unwrap();
    assert_eq!(
        server.functions.detach(&server.engine, engine, &Target::Id(in_file)).unwrap(),
        Origin::File
    );
    assert_eq!(names(&server, engine).len(), 16);
    assert!(server.shutdown().is_clean());
}

#[test]
fn functions_end_with_their_connection_and_others_stay() {
    let _alone = alone();
    let mut server = start(topology(services().into()));
    let [one, two] = users();
    let same_user = Caller { connection: Some(77), ..one };
    let mut ids = Vec::new();
    for (caller, name, bound) in
        [(one, "a", true), (one, "b", false), (same_user, "c", true), (two, "a", true)]
    {
        ids.push(
            server
                .functions
                .create(&server.engine, caller, &threshold(name, 1000), None, bound)
                .unwrap(),
        );
    }
    server
        .functions
        .attach_created(&server.engine, one, ids[0], "shared", &Place::Default)
        .unwrap();
    server
        .functions
        .attach_created(&server.engine, one, ids[1], "shared", &Place::Default)
        .unwrap();
    let none = Caller { connection: None, ..one };
    let unbound =
        text(server.functions.create(&server.engine, none, &threshold("d", 1), None, true));
    assert!(unbound.contains("cannot end with a connection"), "{unbound}");
    assert_eq!(server.functions.end_connection(&server.engine, 1), 1);
    assert_eq!(server.functions.end_connection(&server.engine, 1), 0);
    assert_eq!(names(&server, Caller::engine()), ["b", "c", "a"]);
    assert_eq!(ask(&udp_client(address(&server, 0)), &[0; 32]), [0; 32]);
    assert_eq!(
        server.functions.end_connection(&server.engine, 77)
            + server.functions.end_connection(&server.engine, 2),
        2
    );
    assert_eq!(names(&server, Caller::engine()), ["b"]);
    assert!(server.shutdown().is_clean());
}

#[test]
fn a_place_is_a_number_or_a_neighbour() {
    let _alone = alone();
    let mut server = start(topology(services().into()));
    let engine = Caller::engine();
    for (name, place) in [
        ("b", Place::Default),
        ("a", Place::Before("b".into())),
        ("d", Place::At(99)),
        ("c", Place::After("b".into())),
        ("first", Place::At(0)),
    ] {
        server
            .functions
            .attach_new(&server.engine, engine, "own", &threshold(name, 1), None, &place)
            .unwrap();
    }
    assert_eq!(names(&server, engine), ["first", "a", "b", "c", "d"]);
    let wrong = Place::Before("e".into());
    let answer = text(server.functions.attach_new(
        &server.engine,
        engine,
        "own",
        &threshold("f", 1),
        None,
        &wrong,
    ));
    let expected =
        "service \"own\" has no function \"e\" to be placed at: it has first, a, b, c, d";
    assert_eq!(answer, expected);
    assert!(server.shutdown().is_clean());
}

#[test]
fn other_parameters_keep_the_registers_and_other_code_begins_again_without_a_lost_message() {
    let _alone = alone();
    for function in ["threshold", "/a/name/for/people.wasm"] {
        let mut topology = topology(services().into());
        topology.engine.workers = 2;
        let mut server = start(topology);
        let askers = Askers::start(address(&server, 0), address(&server, 1));
        let [user, _] = users();
        let spec = Spec { function: function.into(), ..threshold("limits", u32::MAX.into()) };
        let content = || spec.is_module().then(wasm);
        let attached = server.functions.attach_new(
            &server.engine,
            user,
            "shared",
            &spec,
            content(),
            &Place::Default,
        );
        let target = Target::Id(attached.unwrap().id);
        askers.go_on();
        let params = |low: u64| Replacement {
            params: Some(vec![("low".into(), low.into())]),
            on_failure: Some(OnFailure::Open),
            ..Replacement::default()
        };
        for low in [0, 0, 0] {
            let before = register(&mut server, user, &target, "count");
            server.functions.replace(&server.engine, user, &target, &params(low), None).unwrap();
            askers.go_on();
            assert!(register(&mut server, user, &target, "count") > before, "it goes on counting");
        }
        let values = ["low", "offset"].map(|name| register(&mut server, user, &target, name));
        assert_eq!(values, [0, 14], "a parameter that is not given has its default");
        let wrong =
            text(server.functions.replace(&server.engine, user, &target, &params(1 << 32), None));
        assert!(wrong.contains("low"), "{wrong}");
        let shown = server.functions.list(&server.engine, user).remove(0);
        assert_eq!(shown.spec.params, [("low".to_owned(), 0.into())], "nothing has changed");
        assert_eq!(shown.spec.on_failure, OnFailure::Open);
        // A setting that a command wrote goes to other code that has it.
        let write = RegisterAction::Write("offset".into(), 20);
        server.functions.registers(&server.engine, user, &target, &write).unwrap();
        let (other, content) = match function {
            "threshold" => ("/another.wasm", Some(wasm())),
            _ => ("threshold", None),
        };
        let code = Replacement { function: Some(other.into()), ..Replacement::default() };
        let before = register(&mut server, user, &target, "count");
        server.functions.replace(&server.engine, user, &target, &code, content).unwrap();
        assert!(register(&mut server, user, &target, "count") < before, "other code begins again");
        assert_eq!(register(&mut server, user, &target, "offset"), 20);
        let garbage = Some(b"garbage".to_vec());
        let code = Replacement { function: Some("/g.wasm".into()), ..Replacement::default() };
        assert!(
            text(server.functions.replace(&server.engine, user, &target, &code, garbage))
                .contains("no WebAssembly")
        );
        let counters = server.functions.counters();
        assert_eq!((counters.load_errors(), counters.init_errors()), (1, 1));
        askers.go_on();
        let answered = askers.finish();
        assert_accounts(&server);
        let shared = server.metrics().service(0);
        assert_eq!((shared.replied, shared.dropped_requests()), (answered, 0));
        assert!(server.shutdown().is_clean());
    }
}

#[test]
fn a_reload_keeps_what_users_attached_as_long_as_they_may() {
    let _alone = alone();
    let [mut shared, own] = services();
    let mut server = start(topology(vec![shared.clone(), own.clone()]));
    let ([one, two], engine) = (users(), Caller::engine());
    let id = server
        .functions
        .create(&server.engine, one, &threshold("created", 1000), None, false)
        .unwrap();
    server.functions.attach_created(&server.engine, one, id, "shared", &Place::Default).unwrap();
    server
        .functions
        .attach_new(&server.engine, two, "shared", &threshold("b", 1000), None, &Place::Default)
        .unwrap();
    let client = udp_client(address(&server, 0));
    assert_eq!(ask(&client, &[0; 32]), [0; 32]);
    // Another version of the service: the instances are others, the function and its counters the same.
    shared.slots = 32;
    change(&mut server, vec![shared.clone(), own.clone()]);
    assert_eq!(names(&server, engine), ["created", "b"]);
    assert_eq!(ask(&client, &[0; 32]), [0; 32]);
    let seen = server.functions.list(&server.engine, one).remove(0);
    assert_eq!((seen.id, seen.counted.messages, seen.service.as_deref()), (id, 4, Some("shared")));
    // One user may not any more: the function that it created is detached, the other one has ended.
    shared.function_users.clear();
    let services = vec![shared.clone(), own.clone()];
    let wanted = Topology { services, ..server.topology().clone() };
    let report = server.change(wanted, &never).unwrap();
    assert_eq!(report.settings, ["service.function", "service.function_users"]);
    assert_eq!(names(&server, engine), ["created"]);
    assert_eq!(server.functions.list(&server.engine, one)[0].service, None);
    let not =
        text(server.functions.attach_created(&server.engine, one, id, "shared", &Place::Default));
    assert_eq!(not, "there is no service \"shared\": this server has none");
    // A function of the file with the name of one that was attached takes its place.
    server.functions.attach_created(&server.engine, engine, id, "shared", &Place::Default).unwrap();
    shared.functions = vec![threshold("created", 500)];
    shared.function_users = vec![one.user];
    change(&mut server, vec![shared.clone(), own.clone()]);
    let shown: Vec<_> = server
        .functions
        .list(&server.engine, Caller::engine())
        .into_iter()
        .map(|f| (f.origin, f.service))
        .collect();
    assert_eq!(shown[0], (Origin::File, Some("shared".to_owned())));
    assert!(matches!(shown[1], (Origin::Created { .. }, None)), "{shown:?}");
    // The service goes, and what was created stays.
    change(&mut server, vec![own]);
    assert_eq!(server.functions.list(&server.engine, Caller::engine())[0].id, id);
    server.functions.destroy(&server.engine, one, id).unwrap();
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}

/// A user cannot have a call of its function hold up a worker for longer than the operator allows.
#[test]
fn the_deadline_of_a_users_function_has_a_limit() {
    let _alone = alone();
    let mut topology = topology(services().into());
    topology.engine.user_deadline_us = EngineSettings::default().user_deadline_us;
    let mut server = start(topology.clone());
    let [user, _] = users();
    let deadline = |server: &Server, name: &str| {
        let functions = server.functions.list(&server.engine, Caller::engine());
        functions.iter().find(|of| of.spec.name == name).unwrap().spec.deadline_us
    };
    let most = onpath::spec::DEADLINE_US_MAX;
    let engine = Caller::engine();
    for (caller, name, expected) in [(user, "of-user", 1000), (engine, "of-operator", most)] {
        let attached = threshold(name, 9);
        server
            .functions
            .attach_new(&server.engine, caller, "shared", &attached, None, &Place::Default)
            .unwrap();
        let created = threshold(&format!("{name}-created"), 9);
        let id = server.functions.create(&server.engine, caller, &created, None, false).unwrap();
        for name in [name, &created.name] {
            assert_eq!(deadline(&server, name), expected, "{name}");
        }
        server
            .functions
            .attach_created(&server.engine, caller, id, "shared", &Place::Default)
            .unwrap();
        for deadline_us in [500, most] {
            let by = Replacement { deadline_us: Some(deadline_us), ..Replacement::default() };
            server
                .functions
                .replace(&server.engine, caller, &named("shared", name), &by, None)
                .unwrap();
            assert_eq!(deadline(&server, name), deadline_us.min(expected), "{name}");
        }
    }
    // A reload with a lower limit changes those that get other instances.
    topology.engine.user_deadline_us = 10;
    topology.services[0].slots *= 2;
    server.change(topology.clone(), &never).unwrap();
    topology.services[0].slots *= 2;
    server.change(topology, &never).unwrap();
    assert_eq!(deadline(&server, "of-user"), 10);
    assert_eq!(deadline(&server, "of-operator"), most);
    assert!(server.shutdown().is_clean());
}
