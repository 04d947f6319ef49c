use super::*;
use std::collections::BTreeSet;

#[test]
fn functions_that_return_or_write_texts_are_listed_and_none_is_twice() {
    let listed: Vec<&str> = LIBRARIES.iter().flat_map(Library::functions).collect();
    assert_eq!(listed.iter().collect::<BTreeSet<_>>().len(), listed.len());
    assert!(RETURN_TEXT.iter().chain(&WRITE_TEXT).all(|name| listed.contains(name)));
}

/// A program in C that calls functions with many arguments, with and without libraries.
#[cfg(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu"))]
#[test]
fn functions_are_found_at_their_first_call_or_say_that_they_are_missing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let compile = |arguments: &[&str]| {
        let mut command = Command::new(env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
        let output = command.current_dir(folder).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    // Outside of a build script, cc has to be told what cargo would tell it.
    for (name, value) in
        [("TARGET", "x86_64-unknown-linux-gnu"), ("HOST", "x86_64-unknown-linux-gnu"), ("OPT_LEVEL", "1")]
    {
        env::set_var(name, value);
    }
    write_archives(folder, 13).unwrap();
    fs::write(
        folder.join("library.c"),
        "int cuMemAlloc_v2(int a, int b, int c, int d, int e, int f, int g, double x, double y) {\n\
         return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + (int)(x * y); }\n",
    )
    .unwrap();
    fs::write(
        folder.join("program.c"),
        "#include <stdio.h>\n\
         int cuMemAlloc_v2(int, int, int, int, int, int, int, double, double);\n\
         int cuInit(int); int cublasCreate_v2(void **); int cuGetErrorString(int, const char **);\n\
         const char *cudaGetErrorString(int);\n\
         int main(void) {\n\
           const char *text = 0;\n\
           for (int i = 0; i < 2; i++) printf(\"%d \", cuMemAlloc_v2(1, 2, 3, 4, 5, 6, 7, 1.5, 4));\n\
           printf(\"%d %d %d \", cuInit(0), cublasCreate_v2(0), cuGetErrorString(34, &text));\n\
           printf(\"%s, %s\\n\", text, cudaGetErrorString(35));\n\
         }\n",
    )
    .unwrap();
    compile(&["program.c", "-o", "program", "-L.", "-lcuda", "-lcublas", "-lcudart"]);
    fs::create_dir(folder.join("there")).unwrap();
    compile(&["-shared", "-fPIC", "library.c", "-o", "there/libcuda.so.1"]);
    let run = |libraries: &str| {
        let output =
            Command::new(folder.join("program")).env("LD_LIBRARY_PATH", folder.join(libraries)).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    let texts = "libcuda.so.1 is not on this machine, libcudart.so.13 is not on this machine\n";
    assert_eq!(run("nowhere"), format!("34 34 34 1 0 {texts}"));
    // Functions that an older library has not are missing like those of none.
    assert_eq!(run("there"), format!("146 146 34 1 0 {texts}"));
}
