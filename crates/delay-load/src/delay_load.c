/* Finds the functions of one shared library when they are first called. library.h says which. */
#include <dlfcn.h>
#include <stddef.h>

enum kind { RETURNS_CODE, RETURNS_TEXT, WRITES_TEXT };

#include "library.h"

struct function {
  const char *name;
  enum kind kind;
};

static const struct function functions[] = {FUNCTIONS};

enum { COUNT = sizeof functions / sizeof *functions };

/* Where each function is; none before its first call. */
__attribute__((visibility("hidden"))) void *TABLE[COUNT];

/* What stands in for functions that are not there. */
static int return_code(void) { return MISSING; }

static const char *return_text(void) { return FILE_NAME " is not on this machine"; }

static int write_text(int code, const char **text) {
  (void)code;
  *text = return_text();
  return 0;
}

/* Threads may do this at the same time: all find the same. */
__attribute__((visibility("hidden"))) void *RESOLVE(unsigned number) {
  const struct function *function = &functions[number];
  void *library = dlopen(FILE_NAME, RTLD_NOW | RTLD_GLOBAL);
  if (library == NULL)
    library = dlopen(OTHER_FILE_NAME, RTLD_NOW | RTLD_GLOBAL);
  void *found = library == NULL ? NULL : dlsym(library, function->name);
  if (found == NULL)
    switch (function->kind) {
    case RETURNS_TEXT: found = (void *)return_text; break;
    case WRITES_TEXT: found = (void *)write_text; break;
    case RETURNS_CODE: found = (void *)return_code; break;
    }
  __atomic_store_n(&TABLE[number], found, __ATOMIC_RELEASE);
  return found;
}
