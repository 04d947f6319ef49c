//! The seeds are what they should be, and survive a few changes.

use candle_quant_fuzz::{mutate, run, seeds, Bundle, TARGETS};

#[test]
fn every_target_has_seeds_that_can_be_opened() {
    for target in TARGETS {
        let seeds = seeds(target);
        assert!(!seeds.is_empty(), "{target}");
        // Fixtures of what has to be refused are among them.
        let opened = seeds.iter().filter(|(_, bundle)| run(bundle)).count();
        assert!(opened * 3 >= seeds.len(), "{target}: {opened} of {}", seeds.len());
    }
}

#[test]
fn bundles_survive_encoding_and_paths_stay_inside() {
    for (name, bundle) in TARGETS.iter().flat_map(|target| seeds(target)) {
        assert_eq!(Bundle::decode(&bundle.encode()), Some(bundle), "{name}");
    }
    for path in ["../x", "/x", "a/../../x", "./x"] {
        let bundle = Bundle { open: String::new(), files: vec![(path.to_owned(), Vec::new())] };
        assert_eq!(Bundle::decode(&bundle.encode()), None, "{path}");
    }
}

#[test]
fn a_few_changes_of_every_seed_do_not_panic() {
    for (name, seed) in TARGETS.iter().flat_map(|target| seeds(target)) {
        for number in 0..5 {
            let mut bundle = seed.clone();
            mutate(&mut bundle, number);
            eprintln!("{name}, {number}");
            run(&bundle);
        }
    }
}
