//! The seeds are what they should be, and survive a few changes.

use candle_quant_fuzz::{mutate, Bundle, TARGETS};

#[test]
fn every_target_has_seeds_that_are_accepted() {
    for target in TARGETS {
        let (seeds, name) = (target.seeds(), target.name);
        assert!(!seeds.is_empty(), "{name}");
        // Those of what has to be refused are among them.
        let accepted = seeds.iter().filter(|(_, bundle)| target.run(bundle)).count();
        assert!(accepted * 4 >= seeds.len(), "{name}: {accepted} of {}", seeds.len());
    }
}

#[test]
fn bundles_survive_encoding_and_paths_stay_inside() {
    for (name, bundle) in TARGETS.iter().flat_map(|target| target.seeds()) {
        assert_eq!(Bundle::decode(&bundle.encode()), Some(bundle), "{name}");
    }
    for path in ["../x", "/x", "a/../../x", "./x"] {
        let bundle = Bundle { open: String::new(), files: vec![(path.to_owned(), Vec::new())] };
        assert_eq!(Bundle::decode(&bundle.encode()), None, "{path}");
    }
}

#[test]
fn a_few_changes_of_every_seed_do_not_panic() {
    for target in TARGETS {
        for (name, seed) in target.seeds() {
            for number in 0..5 {
                let mut bundle = seed.clone();
                mutate(&mut bundle, number);
                eprintln!("{}: {name}, {number}", target.name);
                target.run(&bundle);
            }
        }
    }
}
