// What a test program is at, for the moment when it is ended from outside: by a signal, a failed
// assertion, a sanitizer, a timeout. A crash says nothing of the case that it happened in.
#pragma once
#include <string>

namespace fa::judge {

// What one types to run this program again, and the same mutant if it is a program of many.
std::string this_program();

// From now on the program is at this; empty: at nothing of which there is anything to say.
void at_work_on(const std::string& lines);

// Has those lines written to standard error where the program is ended by a signal or a sanitizer,
// and where they have stayed the same for `patience` seconds, since a kill after a timeout can be
// noticed by nobody. A sanitizer's own report stays as it is.
void tell_what_ends(int patience = 20);

}  // namespace fa::judge
